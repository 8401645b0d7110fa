-- The fast path: record outcomes and claim tasks in one round trip.
-- {schema}  the store's schema
--
-- The rules are Python's (`row_rules`, `gate_rules`). Python has computed the new state of each task from
-- the row as it was claimed; this function writes that state if the row has not changed since. What does
-- not match, and every claim that needs a rule, is left to the engine.

-- Lock the first tasks of these lanes behind a position that no other transaction has locked, in claim order.
-- returns  picked: their row addresses, which are valid while the rows are locked;
--          is_odd: at least one of them is expired, has gates, has no place in line (its turn is below 0) or was
--          cancelled, so the claim needs the rules
CREATE OR REPLACE FUNCTION {schema}.pick(
    p_queues text[], p_functions text[], p_limit int, p_due_by bigint, p_rank bigint, p_turn bigint, p_seq bigint,
    OUT picked tid[], OUT is_odd boolean
)
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    v_page text[];
    v_more tid[];
    v_page_is_odd boolean;
BEGIN
    IF cardinality(p_functions) = 1 AND p_queues[1] IS NOT NULL THEN
        SELECT coalesce(array_agg(first.ctid), '{}'), coalesce(bool_or(first.is_odd), false)
        INTO picked, is_odd
        FROM (
            SELECT ctid, gates IS NOT NULL OR turn < 0 OR cancel_requested
                OR coalesce(expires <= p_due_by, false) AS is_odd
            FROM {schema}.live
            WHERE place = 0 AND func_path = p_functions[1] AND queue = p_queues[1] AND visible <= p_due_by
                AND (rank, turn, seq) > (p_rank, p_turn, p_seq)
            ORDER BY rank, turn, seq LIMIT p_limit FOR UPDATE SKIP LOCKED
        ) AS first;
        RETURN;
    END IF;
    picked := '{}';
    is_odd := false;
    -- Read in the order of all lanes together, and locked only then: locking the first tasks of each
    -- lane would hide tasks from other workers that this claim does not take in the end.
    WHILE cardinality(picked) < p_limit LOOP
        SELECT
            array_agg(id), (array_agg(rank))[count(*)::int], (array_agg(turn))[count(*)::int],
            (array_agg(seq))[count(*)::int]
        INTO v_page, p_rank, p_turn, p_seq
        FROM {schema}.first_of(0::smallint, p_queues, p_functions, p_due_by, p_rank, p_turn, p_seq, p_limit);
        EXIT WHEN v_page IS NULL;
        SELECT coalesce(array_agg(first.ctid), '{}'), coalesce(bool_or(first.is_odd), false)
        INTO v_more, v_page_is_odd
        FROM (
            SELECT ctid, gates IS NOT NULL OR turn < 0 OR cancel_requested
                OR coalesce(expires <= p_due_by, false) AS is_odd
            FROM {schema}.live
            -- `+ 0`: the planner must not use the index of all ready tasks.
            WHERE id = ANY (v_page) AND place + 0 = 0
            ORDER BY rank, turn, seq LIMIT p_limit - cardinality(picked) FOR UPDATE SKIP LOCKED
        ) AS first;
        picked := picked || v_more;
        is_odd := is_odd OR v_page_is_odd;
        EXIT WHEN cardinality(v_page) < p_limit;
    END LOOP;
END $$;

-- p_owner     the worker that records and claims
-- p_now       the time, NULL for the server's
-- p_ended     tasks that have ended
-- p_changed   tasks that will run again or still run
-- p_unique_keys, p_unique_ids  the unique keys that ended tasks free, and the ids of those tasks
-- p_left      the running limits of these tasks; NULL: all limits are applied by the rules
-- p_claim     what to claim; NULL: record only
-- p_is_repeat whether a call whose reply was lost may have recorded and claimed already
-- returns     first a line with the time in `turn`; in `due` when the next task is due, if fewer than p_claim.size
--             were claimed; and in `seq` the state:
--               0 done
--               1 some outcomes did not match, the others are recorded, nothing was claimed
--               2 the owner has no lease: nothing was done
--               3 recorded, but the claim needs the rules
--               4 recorded; more tasks are due than one call may move, call again
--               5 recorded; the witness has a lower token, so nothing was claimed
--               6 recorded; the call before has claimed, or one step of the same claim
--               7 recorded; a part was claimed, call again for the rest
--               8 recorded; a part was claimed, the rest needs the rules
--             then a line for each claimed task, or in state 1 the ids of the outcomes that did not match
CREATE OR REPLACE FUNCTION {schema}.record_outcomes_and_claim(
    p_owner text, p_now bigint, p_ended {schema}.endings, p_changed {schema}.task[],
    p_unique_keys text[], p_unique_ids text[], p_left {schema}.leaving, p_claim {schema}.claim, p_is_repeat boolean
) RETURNS TABLE (
    id text, seq bigint, queue text, func_path text, rank bigint, turn bigint, due bigint, visible bigint,
    created_at bigint, expires bigint, token bigint, settled bigint, attached boolean, rest bytea, body bytea
)
LANGUAGE plpgsql VOLATILE {settings} AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := {schema}.micros(p_now);
    v_due_by bigint := coalesce(p_claim.due_by, v_now);
    v_size int := coalesce(p_claim.size, 0);
    v_recorded text[] := '{}';
    v_missed text[] := '{}';
    v_is_due boolean;
    v_paused text[];
    v_queues text[] := '{}';
    v_functions text[] := '{}';
    v_picked tid[] := '{}';
    v_needs_rules boolean;
    v_is_odd boolean := false;
    v_rest int := 0;
    v_stays bytea[] := '{}';
    v_first_token bigint;
    v_is_behind boolean;
BEGIN
    seq := 0;
    turn := v_now;
    IF v_size > 0 THEN
        -- As in `first_token`.
        PERFORM pg_advisory_xact_lock_shared({schema}.lock_key(p_owner));
        SELECT epoch << 21 INTO v_first_token FROM {schema}.leases
        WHERE leases.owner = p_owner AND NOT fenced AND beat >= p_claim.beat;
        IF NOT FOUND THEN
            seq := 2;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    p_ended.ids := {schema}.ids_of(p_ended.ids);
    p_left.keys := {schema}.ids_of(p_left.keys);
    IF cardinality(p_left.keys) > 0 AND EXISTS (
        SELECT FROM unnest(p_left.keys) AS given (name), LATERAL (
            SELECT data FROM {schema}.documents WHERE kind = 'gate' AND key = given.name OFFSET 0
        ) AS found
        WHERE position('\xa46d6f7265'::bytea IN found.data) > 0
    ) THEN
        -- A limit counts units, or an operator has changed it: all outcomes need the rules.
        seq := 1;
        RETURN NEXT;
        FOREACH id IN ARRAY p_ended.ids LOOP
            RETURN NEXT;
        END LOOP;
        FOR id IN SELECT changed.id FROM unnest(p_changed) AS changed LOOP
            RETURN NEXT;
        END LOOP;
        RETURN;
    END IF;
    IF cardinality(p_ended.ids) > 0 THEN
        v_recorded := {schema}.end_tasks(p_ended);
    END IF;
    IF cardinality(p_changed) > 0 THEN
        v_recorded := v_recorded || {schema}.change_tasks(v_now, p_changed, p_owner);
    END IF;
    IF cardinality(v_recorded) < cardinality(p_ended.ids) + cardinality(p_changed) THEN
        v_missed := array(
            SELECT given.id FROM (
                SELECT ended.id, coalesce(ended.token, p_ended.tokens[1])
                FROM unnest(p_ended.ids, p_ended.tokens) AS ended (id, token)
                UNION ALL
                SELECT changed.id, changed.token FROM unnest(p_changed) AS changed
            ) AS given (id, token)
            WHERE given.id <> ALL (v_recorded) AND NOT (p_is_repeat AND (
                EXISTS (SELECT FROM {schema}.live WHERE live.id = given.id AND live.settled = given.token)
                OR EXISTS (
                    SELECT FROM {schema}.finished
                    WHERE finished.id = given.id AND finished.settled = given.token
                )
            ))
        );
    END IF;
    -- What prevents a claim.
    IF cardinality(v_missed) > 0 THEN
        seq := 1;
    ELSIF v_size > 0 THEN
        SELECT
            EXISTS (SELECT FROM {schema}.live WHERE place = 2 AND visible <= v_due_by),
            EXISTS (SELECT FROM {schema}.documents WHERE kind = 'gate' AND due <= v_now),
            array(SELECT key FROM {schema}.documents WHERE kind = 'paused_queue'),
            EXISTS (SELECT FROM {schema}.live WHERE id = p_claim.witness AND token < p_claim.token)
        INTO v_is_due, v_needs_rules, v_paused, v_is_behind;
        IF p_is_repeat AND EXISTS (
            SELECT FROM {schema}.live WHERE place = 4 AND owner = p_owner AND claim_id = p_claim.name
        ) THEN
            seq := 6;
        ELSIF v_is_behind THEN
            seq := 5;
        ELSIF v_is_due AND {schema}.promote_for(v_due_by, v_size) THEN
            seq := 4;
        -- A gate whose time has come, or a suspect that this owner may take.
        -- Or a function that is paused.
        ELSIF v_needs_rules OR '()' = ANY (SELECT right(name, 2) FROM unnest(v_paused) AS paused (name)) OR EXISTS (SELECT FROM {schema}.live WHERE place = 1) AND NOT EXISTS (
            SELECT FROM {schema}.live WHERE crashes > 0 AND owner = p_owner
        ) THEN
            seq := 3;
        END IF;
    END IF;
    IF seq > 0 OR v_size = 0 THEN
        p_claim := NULL;
    END IF;
    IF p_claim.size IS NOT NULL THEN
        SELECT queues, functions INTO v_queues, v_functions
        FROM {schema}.lanes(0::smallint, p_claim.wanted, v_paused);
        -- Else how many tasks are missing is known when parked ones have been offered the room of their limits.
        IF cardinality(v_functions) > 0 AND coalesce(cardinality(p_left.keys), 0) = 0 THEN
            SELECT picked, is_odd INTO v_picked, v_is_odd FROM {schema}.pick(
                v_queues, v_functions, v_size, v_due_by, -9223372036854775808, -9223372036854775808, -1
            );
        END IF;
    END IF;
    IF v_is_odd AND p_left IS NULL THEN
        seq := 3;
        p_claim := NULL;
        v_picked := '{}';
    ELSIF v_is_odd OR cardinality(p_left.keys) > 0 THEN
        IF cardinality(v_recorded) < cardinality(p_ended.ids) + cardinality(p_changed) THEN
            v_stays := array(
                SELECT '\x92'::bytea || {schema}.packed(given.id) || {schema}.packed(given.token) FROM (
                    SELECT ended.id, coalesce(ended.token, p_ended.tokens[1])
                    FROM unnest(p_ended.ids, p_ended.tokens) AS ended (id, token)
                    UNION ALL
                    SELECT changed.id, changed.token FROM unnest(p_changed) AS changed
                ) AS given (id, token) WHERE given.id <> ALL (v_recorded)
            );
        END IF;
        SELECT passed.picked, passed.rest INTO v_picked, v_rest
        FROM {schema}.pass_limits(
            v_now, p_claim, v_due_by, v_first_token, p_left, v_stays, v_paused, v_queues, v_functions,
            CASE WHEN v_is_odd THEN v_picked END
        ) AS passed;
    END IF;
    -- After the limits: a section that changes both kinds of documents does so in this order.
    IF cardinality(p_unique_keys) > 0 THEN
        -- One lookup for each key: a join would read all keys of the store.
        DELETE FROM {schema}.documents WHERE ctid = ANY (array(
            SELECT found.ctid FROM unnest(p_unique_keys, p_unique_ids) AS given (name, holder), LATERAL (
                SELECT ctid, data FROM {schema}.documents WHERE kind = 'unique' AND key = given.name OFFSET 0
            ) AS found
            WHERE found.data = convert_to(holder, 'UTF8') AND holder = ANY (v_recorded)
        ));
    END IF;
    IF v_rest > 0 THEN
        seq := 6 + v_rest;
    ELSIF p_claim.size IS NOT NULL AND cardinality(v_picked) < v_size THEN
        due := {schema}.next_due(v_now);
    END IF;
    RETURN NEXT;
    FOREACH id IN ARRAY v_missed LOOP
        RETURN NEXT;
    END LOOP;
    IF cardinality(v_picked) = 0 THEN
        RETURN;
    END IF;
    RETURN QUERY
    -- What `row_rules.claim` does to a row, in one statement for all rows of the claim.
    UPDATE {schema}.live
    SET place = 4, status = 1, owner = p_owner, token = greatest(token + 1, v_first_token),
        started_at = v_now, parked = NULL, claim_id = p_claim.name
    WHERE ctid = ANY (v_picked)
    RETURNING id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled, attached,
        {schema}.fitting(rest), {schema}.fitting(body);
END $$;

-- The same for workers of version 7, which apply all limits by the rules.
CREATE OR REPLACE FUNCTION {schema}.record_outcomes_and_claim(
    p_owner text, p_now bigint, p_ended {schema}.endings, p_changed {schema}.task[],
    p_unique_keys text[], p_unique_ids text[], p_claim {schema}.claim, p_is_repeat boolean
) RETURNS TABLE (
    id text, seq bigint, queue text, func_path text, rank bigint, turn bigint, due bigint, visible bigint,
    created_at bigint, expires bigint, token bigint, settled bigint, attached boolean, rest bytea, body bytea
)
LANGUAGE sql VOLATILE {pinned} AS $$
    SELECT * FROM {schema}.record_outcomes_and_claim(
        p_owner, p_now, p_ended, p_changed, p_unique_keys, p_unique_ids, NULL, p_claim, p_is_repeat
    )
$$;
