-- The fast path: record outcomes and claim tasks in one round trip. The function is called `turn`.
-- {schema}  the store's schema
--
-- The rules are Python's (`row_rules`, `gate_rules`). Python has computed the new state of each task from
-- the row as it was claimed; this function writes that state if the row has not changed since. What does
-- not match, and every claim that needs a rule, is reported to the caller, which uses the rule path: a
-- transaction in which Python applies the rules.
--
-- p_owner           the worker that records and claims
-- p_now             the time, NULL for the server's
-- Tasks that have ended, one element each:
--   p_ended           ids
--   p_ended_tokens    tokens of their claims
--   p_ended_statuses  final statuses
--   p_results         encoded results
-- Tasks that will run again or still run, one element each:
--   p_changed         ids
--   p_changed_tokens  tokens of their claims
--   p_statuses, p_attempts, p_releases, p_dues, p_visibles, p_histories
--                     their new values of the columns of `live`
--   p_kept            whether the owner still holds the task
-- The claim:
--   p_limit           the number of tasks to claim; 0: record only
--   p_due_by          tasks due at this time may be claimed; NULL: now
--   p_queues          the queues to claim from; NULL: all
--   p_claim_id        written to the claimed rows, so that a repeat finds them
--   p_is_repeat       whether a call whose reply was lost may have made the claim already
-- returns           first a row with
--                     state     0 done
--                               1 some outcomes did not match: their ids are in `missed`, the others
--                                 are recorded, nothing was claimed
--                               2 the owner has no lease: nothing was done
--                               3 recorded, but the claim needs the rule path
--                               4 recorded; more tasks are due than one call may move, call again
--                     at        the time
--                     next_due  when the next task is due, if fewer than p_limit were claimed
--                   then a row for each claimed task
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
    v_changed text[];
    v_survey record;
    v_picked tid[] := '{}';
    v_needs_rules boolean;
BEGIN
    state := 0;
    at := v_now;
    IF p_limit > 0 THEN
        -- A transaction that fences this owner waits until this claim ends, or this claim sees the fence.
        PERFORM pg_advisory_xact_lock_shared({schema}.lock_key(p_owner));
        IF NOT EXISTS (SELECT FROM {schema}.leases WHERE owner = p_owner AND NOT fenced) THEN
            state := 2;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    IF cardinality(p_ended) > 0 THEN
        WITH deleted AS (
            DELETE FROM {schema}.live
            USING unnest(p_ended, p_ended_tokens, p_ended_statuses, p_results)
                AS given (id, token, status, result)
            WHERE live.id = given.id AND live.token = given.token AND live.owner = p_owner
                AND live.gates IS NULL AND NOT live.cancel_requested AND NOT live.attached
            RETURNING live.*, given.status AS ended_as, given.result AS result
        ),
        stored AS (
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
            FROM deleted WHERE result_ttl > 0
        )
        SELECT coalesce(array_agg(deleted.id), '{}') INTO v_recorded FROM deleted;
        PERFORM {schema}.tell_of_results(v_recorded);
    END IF;
    IF cardinality(p_changed) > 0 THEN
        WITH changed AS (
            UPDATE {schema}.live
            SET status = given.status, attempts = given.attempts, releases = given.releases,
                due = given.due, visible = given.visible, history = given.history,
                settled = CASE WHEN given.is_held THEN live.settled ELSE given.token END,
                owner = CASE WHEN given.is_held THEN live.owner END,
                claim_id = CASE WHEN given.is_held THEN live.claim_id END,
                place = CASE WHEN given.is_held THEN 4 ELSE
                    {schema}.place_of(given.visible, v_now, false, live.crashes > 0, false) END
            FROM unnest(
                p_changed, p_changed_tokens, p_statuses, p_attempts, p_releases, p_dues,
                p_visibles, p_kept, p_histories
            ) AS given (id, token, status, attempts, releases, due, visible, is_held, history)
            WHERE live.id = given.id AND live.token = given.token AND live.owner = p_owner
                AND live.gates IS NULL AND NOT live.cancel_requested
            RETURNING live.id
        )
        SELECT coalesce(array_agg(changed.id), '{}') INTO v_changed FROM changed;
        v_recorded := v_recorded || v_changed;
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
    v_needs_rules := cardinality(v_survey.gated || v_survey.suspects || v_survey.lots) > 0;
    IF NOT v_needs_rules AND cardinality(v_survey.ready) > 0 THEN
        SELECT picked, is_odd INTO v_picked, v_needs_rules
        FROM {schema}.pick(v_survey.ready, p_limit, v_due_by);
    END IF;
    IF v_needs_rules THEN
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
    -- What `row_rules.claim` does to a row, in one statement for all rows of the claim.
    UPDATE {schema}.live
    SET place = 4, status = 1, owner = p_owner, token = token + 1, started_at = v_now,
        claim_id = p_claim_id
    WHERE ctid = ANY (v_picked)
    RETURNING 0, NULL::text[], v_now, NULL::bigint,
        id, seq, queue, rank, func_path, body, due, visible, attempts, crashes, releases, token,
        started_at, cancel_requested, repeats, expires, history;
END $$;
