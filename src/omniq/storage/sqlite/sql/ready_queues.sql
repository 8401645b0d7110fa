-- The queues that have tasks to claim, each with the order of its first task.
-- {place}   0 for ready tasks, 1 for suspects
-- {names}   where the names come from: all_queues, or given_queues (:queues, a JSON array)
-- returns   a JSON array of [priority, due, seq, queue]
WITH RECURSIVE
    -- Reads one index entry for each queue, not one for each task.
    all_queues (queue) AS (
        SELECT (SELECT queue FROM omniq_live WHERE place = {place} AND queue > '' ORDER BY queue LIMIT 1)
        UNION ALL
        SELECT (
            SELECT next.queue FROM omniq_live AS next
            WHERE next.place = {place} AND next.queue > all_queues.queue
            ORDER BY next.queue LIMIT 1
        )
        FROM all_queues WHERE all_queues.queue IS NOT NULL
    ),
    given_queues (queue) AS (SELECT value FROM json_each(:queues))
SELECT json_group_array(json_array(first.priority, first.due, first.seq, first.queue))
FROM {names} AS names
CROSS JOIN omniq_live AS first ON first.seq = (
    SELECT head.seq FROM omniq_live AS head
    WHERE head.place = {place} AND head.queue = names.queue
    ORDER BY head.priority DESC, head.due, head.seq LIMIT 1
)
WHERE names.queue NOT IN (SELECT queue FROM omniq_paused)
