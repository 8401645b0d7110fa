-- The tasks among these that an owner holds, unchanged by others since it claimed them.
-- :owner, :claims (a JSON array of [seq, token, id]; the `seq` of a task that is deleted may be given again)
-- returns   a JSON array of ids
SELECT json_group_array(tasks.id)
FROM json_each(:claims) AS claim
CROSS JOIN omniq_live AS live ON live.seq = json_extract(claim.value, '$[0]')
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq AND tasks.id = json_extract(claim.value, '$[2]')
WHERE live.place = 4 AND live.owner = :owner AND live.token = json_extract(claim.value, '$[1]')
    AND live.cancel_requested = 0 AND live.attached = 0
