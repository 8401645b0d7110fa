-- The same functions for storages behind a pooler, which shares sessions: the planner's options are set in
-- each call, not once in a session. Without them the planner would read whole tables, because it plans for
-- the size that a table had when it was last analyzed.
-- {schema}  the store's schema

CREATE OR REPLACE FUNCTION {schema}.turn_pooled(
    text, bigint, text[], bigint[], smallint[], bytea[], text[], bigint[], smallint[], bigint[],
    int[], bigint[], bigint[], boolean[], bytea[], int, bigint, text[], text, boolean
) RETURNS TABLE (
    state int, missed text[], at bigint, next_due bigint,
    id text, seq bigint, queue text, rank bigint, func_path text, body bytea, due bigint,
    visible bigint, attempts bigint, crashes int, releases int, token bigint, started_at bigint,
    cancel_requested boolean, repeats boolean, expires bigint, history bytea
)
LANGUAGE sql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
    SELECT * FROM {schema}.turn(
        $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20
    )
$$;

CREATE OR REPLACE FUNCTION {schema}.enqueue_pooled(
    text[], text[], text[], bigint[], text[], bytea[], bigint[], bigint[], bigint[], bigint[],
    boolean[], text[], bigint[], bigint[], bytea[], bigint, bigint, boolean,
    OUT refusal text, OUT detail text, OUT ids text[]
)
LANGUAGE sql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
    SELECT * FROM {schema}.enqueue(
        $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18
    )
$$;
