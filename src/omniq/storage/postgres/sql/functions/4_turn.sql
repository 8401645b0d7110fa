-- A worker's turn at the store: record what finished and claim anew, in one round trip.
-- {schema}  the store's schema
--
-- Only what needs no rule of its own is done here. The rules are Python's (`_rows`, `_gates`): it has
-- worked out what each outcome makes of a task, on the condition that the task is as it was when it
-- was claimed, which is checked here. Everything else is told and left to a slower transaction.
--
-- p_owner, p_now (NULL: the server's time)
-- p_ended…     tasks that have ended: id, token, status and result
-- p_changed…   tasks that go on: id, token and their new state; p_kept: still held by the owner
-- p_limit, p_due_by (NULL: now), p_queues (NULL: all), p_claim_id
-- p_is_repeat  whether the claim may have been made already by a call whose reply was lost
-- returns      first a line with
--                state     0 done
--                          1 some outcomes did not match: they are `missed`, and nothing was claimed
--                          2 the owner has no lease: nothing was done
--                          3 recorded, but the claim needs the slower transaction
--                          4 recorded; more has come due than one call may move, call again
--                at        the time
--                next_due  when the next task comes due, if fewer were claimed than asked for
--              then a line for each claimed task
CREATE OR REPLACE FUNCTION {schema}.turn(
    p_owner text, p_now bigint,
    p_ended text[], p_ended_tokens bigint[], p_ended_statuses smallint[], p_results bytea[],
    p_changed text[], p_changed_tokens bigint[], p_statuses smallint[], p_attempts bigint[],
    p_releases int[], p_dues bigint[], p_visibles bigint[], p_kept boolean[], p_histories bytea[],
    p_limit int, p_due_by bigint, p_queues text[], p_claim_id text, p_is_repeat boolean
) RETURNS TABLE (
    state int, missed text[], at bigint, next_due bigint,
    id text, seq bigint, queue text, rank bigint, func_path text, body bytea, due bigint,
    visible bigint, attempts bigint, crashes int, releases int, token bigint, started_at bigint,
    cancel_requested boolean, repeats boolean, expires bigint, history bytea
)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := {schema}.micros(p_now);
    v_due_by bigint := coalesce(p_due_by, v_now);
    v_recorded text[] := '{}';
    v_more text[];
    v_survey record;
    v_picked tid[] := '{}';
    v_is_odd boolean;
BEGIN
    state := 0;
    at := v_now;
    IF p_limit > 0 THEN
        -- Whoever fences this owner waits for the end of this claim, or this claim sees the fence.
        PERFORM pg_advisory_xact_lock_shared({schema}.lock_key(p_owner));
        IF NOT EXISTS (SELECT FROM {schema}.leases WHERE owner = p_owner AND NOT fenced) THEN
            state := 2;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    IF cardinality(p_ended) > 0 THEN
        WITH gone AS (
            DELETE FROM {schema}.live
            USING unnest(p_ended, p_ended_tokens, p_ended_statuses, p_results)
                AS given (id, token, status, result)
            WHERE live.id = given.id AND live.token = given.token AND live.owner = p_owner
                AND live.gates IS NULL AND NOT live.cancel_requested AND NOT live.attached
            RETURNING live.*, given.status AS ended_as, given.result AS result
        ),
        kept AS (
            INSERT INTO {schema}.finished (
                seq, rank, due, visible, created_at, attempts, token, settled, started_at,
                result_ttl, expires, crashes, releases, status, cancel_requested, repeats, id,
                nonce, queue, func_path, unique_key, gates, history, body, finished_at, expires_at,
                result
            )
            SELECT
                seq, rank, due, visible, created_at, attempts, token, token, started_at,
                result_ttl, expires, crashes, releases, ended_as, cancel_requested, repeats, id,
                nonce, queue, func_path, unique_key, gates, history, body, v_now,
                v_now + result_ttl, result
            FROM gone WHERE result_ttl > 0
        )
        SELECT coalesce(array_agg(gone.id), '{}') INTO v_recorded FROM gone;
        PERFORM {schema}.tell_of_results(v_recorded);
    END IF;
    IF cardinality(p_changed) > 0 THEN
        WITH changed AS (
            UPDATE {schema}.live
            SET status = given.status, attempts = given.attempts, releases = given.releases,
                due = given.due, visible = given.visible, history = given.history,
                settled = CASE WHEN given.kept THEN live.settled ELSE given.token END,
                owner = CASE WHEN given.kept THEN live.owner END,
                claim_id = CASE WHEN given.kept THEN live.claim_id END,
                place = CASE WHEN given.kept THEN 4 ELSE
                    {schema}.place_of(given.visible, v_now, false, live.crashes > 0, false) END
            FROM unnest(
                p_changed, p_changed_tokens, p_statuses, p_attempts, p_releases, p_dues,
                p_visibles, p_kept, p_histories
            ) AS given (id, token, status, attempts, releases, due, visible, kept, history)
            WHERE live.id = given.id AND live.token = given.token AND live.owner = p_owner
                AND live.gates IS NULL AND NOT live.cancel_requested
            RETURNING live.id
        )
        SELECT coalesce(array_agg(changed.id), '{}') INTO v_more FROM changed;
        v_recorded := v_recorded || v_more;
    END IF;
    IF cardinality(v_recorded) < cardinality(p_ended) + cardinality(p_changed) THEN
        state := 1;
        missed := array(
            SELECT given.id FROM unnest(p_ended || p_changed) AS given (id)
            WHERE given.id <> ALL (v_recorded)
        );
        RETURN NEXT;
        RETURN;
    END IF;
    IF p_limit = 0 THEN
        RETURN NEXT;
        RETURN;
    END IF;
    IF p_is_repeat AND EXISTS (
        SELECT FROM {schema}.live WHERE place = 4 AND owner = p_owner AND claim_id = p_claim_id
    ) THEN
        RETURN NEXT;
        RETURN QUERY SELECT 0, NULL::text[], v_now, NULL::bigint,
            id, seq, queue, rank, func_path, body, due, visible, attempts, crashes, releases,
            token, started_at, cancel_requested, repeats, expires, history
        FROM {schema}.live
        WHERE place = 4 AND owner = p_owner AND claim_id = p_claim_id AND status = 1;
        RETURN;
    END IF;
    v_survey := {schema}.survey(p_owner, p_queues, p_limit, v_now, v_due_by);
    IF v_survey.is_partial THEN
        state := 4;
        RETURN NEXT;
        RETURN;
    END IF;
    v_is_odd := cardinality(v_survey.gated || v_survey.suspects || v_survey.lots) > 0;
    IF NOT v_is_odd AND cardinality(v_survey.ready) > 0 THEN
        SELECT picked, is_odd INTO v_picked, v_is_odd
        FROM {schema}.pick(v_survey.ready, p_limit, v_due_by);
    END IF;
    IF v_is_odd THEN
        state := 3;
        RETURN NEXT;
        RETURN;
    END IF;
    IF cardinality(v_picked) < p_limit THEN
        SELECT min(visible) INTO next_due FROM {schema}.live WHERE place = 2;
    END IF;
    RETURN NEXT;
    IF cardinality(v_picked) = 0 THEN
        RETURN;
    END IF;
    RETURN QUERY
    -- What `_rows.claim` does to a row, to all rows of the claim at once.
    UPDATE {schema}.live
    SET place = 4, status = 1, owner = p_owner, token = token + 1, started_at = v_now,
        claim_id = p_claim_id
    WHERE ctid = ANY (v_picked)
    RETURNING 0, NULL::text[], v_now, NULL::bigint,
        id, seq, queue, rank, func_path, body, due, visible, attempts, crashes, releases, token,
        started_at, cancel_requested, repeats, expires, history;
END $$;
