-- The gates under which something is parked: from one key to the next in the index.
-- returns   a JSON array of keys
WITH RECURSIVE keys (key) AS (
    SELECT (SELECT parked FROM omniq_live WHERE place = 3 AND parked > '' ORDER BY parked LIMIT 1)
    UNION ALL
    SELECT (
        SELECT next.parked FROM omniq_live AS next
        WHERE next.place = 3 AND next.parked > keys.key
        ORDER BY next.parked LIMIT 1
    )
    FROM keys WHERE keys.key IS NOT NULL
)
SELECT json_group_array(key) FROM keys WHERE key IS NOT NULL
