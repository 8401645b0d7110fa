-- The first tasks of one lane behind a position.
-- {live}    see tables.py; {queue}, {index} see lanes.sql
-- :place, :queue, :func, :rank, :turn, :seq, :due_by, :limit
-- returns   a JSON array of rows in claim order
SELECT json_group_array(json_array({live}))
FROM (
    SELECT head.* FROM omniq_live AS head INDEXED BY {index}
    WHERE head.place <= 1 AND head.place = :place AND {queue} = :queue
        AND head.func = :func AND (head.rank, head.turn, head.seq) > (:rank, :turn, :seq)
        AND head.visible <= :due_by
    ORDER BY head.rank, head.turn, head.seq LIMIT :limit
) AS live
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq
