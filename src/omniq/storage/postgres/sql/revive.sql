-- Make a dead letter's task live again, behind those that are in the queue. Its state is written next.
-- $1  the id
-- $2  its new body, or NULL
INSERT INTO {schema}.live (
    rank, due, visible, created_at, attempts, token, result_ttl, expires, place, repeats, id, nonce,
    queue, func_path, unique_key, gates, body
)
SELECT
    rank, due, visible, created_at, attempts, token, result_ttl, expires, 0, repeats, id, nonce,
    queue, func_path, unique_key, gates, coalesce($2, body)
FROM {schema}.dead WHERE id = $1
