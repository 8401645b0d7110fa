-- The tasks that owners hold, without their bodies, and the states of their gates.
-- $1  the owners
-- $2  whether only suspects are wanted
WITH found AS MATERIALIZED (
    SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
        started_at, crashes, status, cancel_requested, attached, owner, parked, {schema}.fitting(rest) AS rest, ''::bytea AS body,
        gates, xmin
    FROM {schema}.live WHERE place = 4 AND owner = ANY ($1) AND (crashes > 0 OR NOT $2)
)
SELECT * FROM found
UNION ALL
SELECT key, -1, NULL, NULL, NULL, NULL, due, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, data, NULL, NULL, NULL
FROM {schema}.documents
WHERE kind = 'gate' AND key = ANY (array(SELECT pg_catalog.unnest(gates) FROM found))
