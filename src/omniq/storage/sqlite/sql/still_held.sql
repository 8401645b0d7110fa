-- The tokens of the tasks among these that an owner holds, neither cancelled nor `attached`.
-- :owner, :seqs (a JSON array; the `seq` of a task that is deleted may be given again)
-- returns   a JSON object: the token of each by its id
SELECT json_group_object(tasks.id, live.token)
FROM json_each(:seqs) AS wanted
CROSS JOIN omniq_live AS live ON live.seq = wanted.value
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq
WHERE live.place = 4 AND live.owner = :owner AND live.cancel_requested = 0 AND live.attached = 0
