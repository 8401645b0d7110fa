-- The first tasks parked under a gate, in the order they are to be claimed.
-- {columns} see _sqlite_tables
-- :key, :limit
-- returns   a JSON array of rows
SELECT json_group_array(json_array({columns}))
FROM (
    SELECT * FROM omniq_live
    WHERE place = 3 AND parked = :key
    ORDER BY priority DESC, due, seq LIMIT :limit
) AS state
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = state.seq
