-- The first tasks that are parked under gates: of each gate, queue and function, and of suspects and
-- others apart.
-- {live}    see tables.py
-- :keys (a JSON array), :limit
-- returns   a JSON array of rows; those of one lot are in claim order
WITH RECURSIVE lots (parked, lot) AS (
    SELECT value, (
        SELECT lot FROM omniq_live WHERE place = 3 AND parked = value AND lot > '' ORDER BY lot LIMIT 1
    )
    FROM json_each(:keys)
    UNION ALL
    SELECT lots.parked, (
        SELECT next.lot FROM omniq_live AS next
        WHERE next.place = 3 AND next.parked = lots.parked AND next.lot > lots.lot
        ORDER BY next.lot LIMIT 1
    )
    FROM lots WHERE lots.lot IS NOT NULL
)
SELECT json_group_array(json_array({live}))
FROM lots
CROSS JOIN omniq_live AS live ON live.seq IN (
    SELECT head.seq FROM omniq_live AS head
    WHERE head.place = 3 AND head.parked = lots.parked AND head.lot = lots.lot
    ORDER BY head.rank, head.turn, head.seq LIMIT :limit
)
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq
