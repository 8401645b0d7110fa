-- What is stored under these ids.
-- {any}, {joins}, {ended} see tables.py
-- :ids (a JSON array), :now
-- returns   a JSON array of rows, each followed by: finished_at and expires_at (NULL without a record of
--           its end), whether it is a dead letter, the result, the letter
SELECT json_group_array(json_array(
    {any}, finished.finished_at, finished.expires_at, dead.seq IS NOT NULL, {ended}
))
FROM json_each(:ids) AS wanted
CROSS JOIN omniq_tasks AS tasks ON tasks.id = wanted.value
{joins}
WHERE coalesce(live.seq, dead.seq, finished.seq) IS NOT NULL
