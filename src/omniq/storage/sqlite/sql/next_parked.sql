-- The first tasks of a lot, in claim order.
-- {columns} see tables.py
-- :source (the lot), :limit, :skip
-- returns   a JSON array of rows
SELECT json_group_array(json_array({columns}))
FROM (
    SELECT * FROM omniq_live
    WHERE place = 3 AND lot = :source
    ORDER BY priority DESC, due, seq LIMIT :limit OFFSET :skip
) AS state
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = state.seq
