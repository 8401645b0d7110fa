-- The tasks that an owner holds.
-- {columns} see tables.py
-- :owner
-- returns   a JSON array of rows
SELECT json_group_array(json_array({columns}))
FROM omniq_live AS state
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = state.seq
WHERE state.place = 4 AND state.owner = :owner
