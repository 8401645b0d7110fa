-- The lots of parked tasks, each with the order of its first task.
-- returns   a JSON array of [priority, due, seq, lot]
WITH RECURSIVE lots (lot) AS (
    SELECT (SELECT lot FROM omniq_live WHERE place = 3 AND lot > '' ORDER BY lot LIMIT 1)
    UNION ALL
    SELECT (
        SELECT next.lot FROM omniq_live AS next
        WHERE next.place = 3 AND next.lot > lots.lot
        ORDER BY next.lot LIMIT 1
    )
    FROM lots WHERE lots.lot IS NOT NULL
)
SELECT json_group_array(json_array(first.priority, first.due, first.seq, first.lot))
FROM lots
CROSS JOIN omniq_live AS first ON first.seq = (
    SELECT head.seq FROM omniq_live AS head
    WHERE head.place = 3 AND head.lot = lots.lot
    ORDER BY head.priority DESC, head.due, head.seq LIMIT 1
)
