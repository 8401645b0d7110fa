-- Count tasks by table, status and queue, in one snapshot.
-- $1       the time, NULL for the server's
-- returns  first a row with the time as `due`; then kind (live, finished, dead), status, queue, count,
--          and for live tasks the earliest `due` of those that are not held
SELECT 'now' AS kind, NULL::smallint AS status, NULL::text AS queue, NULL::bigint AS count,
    {schema}.micros($1) AS due
UNION ALL
SELECT 'live', status, queue, pg_catalog.count(*), pg_catalog.min(due) FILTER (WHERE place <> 4)
FROM {schema}.live GROUP BY status, queue
UNION ALL
SELECT 'finished', status, NULL, pg_catalog.count(*), NULL
FROM {schema}.finished WHERE expires_at > (SELECT {schema}.micros($1)) GROUP BY status
UNION ALL
SELECT 'dead', NULL, NULL, pg_catalog.count(*), NULL FROM {schema}.dead
