-- Copy a dead letter's task back to `live`, with a new sequence number: it is queued behind the others.
-- The caller writes its state next.
-- $1  the id
-- $2  the new body, or NULL to use the old one
INSERT INTO {schema}.live (
    rank, due, visible, created_at, attempts, token, result_ttl, expires, place, repeats, id, nonce,
    queue, func_path, unique_key, gates, body
)
SELECT
    rank, due, visible, created_at, attempts, token, result_ttl, expires, 0, repeats, id, nonce,
    queue, func_path, unique_key, gates, coalesce($2, body)
FROM {schema}.dead WHERE id = $1
