-- The next page of tasks that a claim may take, from all its places together, in claim order.
-- $1, $2, $3  the queues to search for ordinary tasks, for gated ones, for suspects
-- $4          the lots of parked tasks to search
-- $5, $6, $7  the rank, due and seq of the last task of the page before
-- $8          the size of the page
-- returns     id, rank, due, seq
SELECT id, rank, due, seq
FROM (
    SELECT first.* FROM unnest($1::text[]) AS requested (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 0 AND place IN (0, 1, 5) AND queue = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
    UNION ALL
    SELECT first.* FROM unnest($2::text[]) AS requested (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 5 AND place IN (0, 1, 5) AND queue = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
    UNION ALL
    SELECT first.* FROM unnest($3::text[]) AS requested (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 1 AND place IN (0, 1, 5) AND queue = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
    UNION ALL
    SELECT first.* FROM unnest($4::text[]) AS requested (name), LATERAL (
        SELECT id, rank, due, seq FROM {schema}.live
        WHERE place = 3 AND lot = name AND (rank, due, seq) > ($5, $6, $7)
        ORDER BY rank, due, seq LIMIT $8
    ) AS first
) AS candidates
ORDER BY rank, due, seq LIMIT $8
