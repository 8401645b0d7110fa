-- The first tasks of a queue, in claim order.
-- {place}   0 for ready tasks, 1 for suspects
-- {columns} see tables.py
-- :source (the queue), :limit, :skip
-- returns   a JSON array of rows
SELECT json_group_array(json_array({columns}))
FROM (
    SELECT * FROM omniq_live
    WHERE place = {place} AND queue = :source
    ORDER BY priority DESC, due, seq LIMIT :limit OFFSET :skip
) AS state
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = state.seq
