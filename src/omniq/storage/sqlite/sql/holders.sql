-- The owners that hold tasks. Reads one index entry for each owner, not one for each task.
-- returns   a JSON array of owners
WITH RECURSIVE owners (owner) AS (
    SELECT (SELECT owner FROM omniq_live WHERE place = 4 AND owner > '' ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT (
        SELECT next.owner FROM omniq_live AS next
        WHERE next.place = 4 AND next.owner > owners.owner
        ORDER BY next.owner LIMIT 1
    )
    FROM owners WHERE owners.owner IS NOT NULL
)
SELECT json_group_array(owner) FROM owners WHERE owner IS NOT NULL
