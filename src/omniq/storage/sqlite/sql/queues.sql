-- The queues that have tasks to claim. Reads one index entry for each queue, not one for each task.
-- returns   a JSON array of names
WITH RECURSIVE queues (place, queue) AS (
    SELECT value, (
        SELECT next.queue FROM omniq_live AS next INDEXED BY omniq_ready_by_queue
        WHERE next.place <= 1 AND next.place = value AND next.queue > ''
        ORDER BY next.queue LIMIT 1
    )
    FROM json_each('[0, 1]')
    UNION ALL
    SELECT place, (
        SELECT next.queue FROM omniq_live AS next INDEXED BY omniq_ready_by_queue
        WHERE next.place <= 1 AND next.place = queues.place AND next.queue > queues.queue
        ORDER BY next.queue LIMIT 1
    )
    FROM queues WHERE queues.queue IS NOT NULL
)
SELECT json_group_array(queue) FROM queues WHERE queue IS NOT NULL
