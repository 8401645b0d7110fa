-- The token of a live task.
-- ?         its id
SELECT live.token
FROM omniq_tasks AS tasks CROSS JOIN omniq_live AS live ON live.seq = tasks.seq
WHERE tasks.id = ?
