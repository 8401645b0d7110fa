-- The tasks that an owner holds.
-- :owner
-- returns   a JSON array of [id, token, whether it was cancelled]
SELECT json_group_array(json_array(tasks.id, live.token, live.cancel_requested))
FROM omniq_live AS live CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq
WHERE live.place = 4 AND live.owner = :owner
