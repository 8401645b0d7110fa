-- The next tasks that a claim may look at, from all its places together, in order.
-- $1, $2, $3  the queues to look into for ordinary tasks, for gated ones, for suspects
-- $4          the lots of parked tasks to look into
-- $5, $6, $7  the rank, due and seq after which to go on
-- $8          how many
-- returns     id, rank, due, seq
SELECT id, rank, due, seq
FROM (
    SELECT first.* FROM unnest($1::text[]) AS asked (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 0 AND place IN (0, 1, 5) AND queue = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
    UNION ALL
    SELECT first.* FROM unnest($2::text[]) AS asked (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 5 AND place IN (0, 1, 5) AND queue = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
    UNION ALL
    SELECT first.* FROM unnest($3::text[]) AS asked (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 1 AND place IN (0, 1, 5) AND queue = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
    UNION ALL
    SELECT first.* FROM unnest($4::text[]) AS asked (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 3 AND lot = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
) AS candidates
ORDER BY rank, due, seq LIMIT $8
