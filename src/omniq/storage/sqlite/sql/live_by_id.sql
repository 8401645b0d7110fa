-- The live tasks with these ids.
-- {columns} see tables.py
-- :ids      a JSON array
-- returns   a JSON array of rows
SELECT json_group_array(json_array({columns}))
FROM json_each(:ids) AS wanted
CROSS JOIN omniq_tasks AS tasks ON tasks.id = wanted.value
CROSS JOIN omniq_live AS state ON state.seq = tasks.seq
