-- The record of one task, live or finished.
-- {columns} see tables.py
-- :id, :now
-- returns   a row as JSON; then finished_at, expires_at and result, which are NULL for a live task
SELECT json_array({columns}), finished.finished_at, finished.expires_at, finished.result
FROM omniq_tasks AS tasks
LEFT JOIN omniq_live AS live ON live.seq = tasks.seq
LEFT JOIN omniq_finished AS finished
    ON finished.seq = tasks.seq AND finished.expires_at > :now AND live.seq IS NULL
WHERE tasks.id = :id AND coalesce(live.seq, finished.seq) IS NOT NULL
