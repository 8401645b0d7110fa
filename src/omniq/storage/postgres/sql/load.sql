-- What is stored under ids: live tasks with the states of their gates, records, dead letters.
-- $1  the ids
-- $2  the time: records that have expired are left out
-- $3  whether to read the bodies
WITH found AS MATERIALIZED (
    SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
        started_at, crashes, status, cancel_requested, attached, owner, parked, {schema}.fitting(rest) AS rest,
        CASE WHEN $3 THEN {schema}.fitting(body) ELSE '' END AS body, gates, xmin
    FROM {schema}.live WHERE id = ANY ($1)
)
SELECT *, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea FROM found
UNION ALL
SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
    started_at, crashes, status, cancel_requested, false, NULL, NULL, {schema}.fitting(rest),
    CASE WHEN $3 THEN {schema}.fitting(body) ELSE '' END, NULL, NULL, finished_at, expires_at, {schema}.fitting(result), NULL
FROM {schema}.finished WHERE id = ANY ($1) AND expires_at > $2
UNION ALL
SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
    started_at, crashes, status, cancel_requested, false, NULL, NULL, {schema}.fitting(rest),
    CASE WHEN $3 THEN {schema}.fitting(body) ELSE '' END, NULL, NULL, NULL, NULL, NULL, {schema}.fitting(letter)
FROM {schema}.dead WHERE id = ANY ($1)
UNION ALL
SELECT key, -1, NULL, NULL, NULL, NULL, due, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, data, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM {schema}.documents
WHERE kind = 'gate' AND key = ANY (array(SELECT pg_catalog.unnest(gates) FROM found))
