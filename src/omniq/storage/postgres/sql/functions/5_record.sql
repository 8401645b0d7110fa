-- The rule path's reads and writes, many tasks in each call; leases and fences.
-- {schema}  the store's schema

-- Begin a transaction of the rule path: wait for the locks, then read the time.
-- p_owner      an owner that claims, or NULL
-- p_has_gates  whether gates may change: one transaction at a time changes them
-- p_now        the time, NULL for the server's
-- p_is_pooled  whether to set the planner's options here, because the session is a pooler's
-- returns      the time, and whether the owner has a lease
CREATE OR REPLACE FUNCTION {schema}.begin_changes(
    p_owner text, p_has_gates boolean, p_now bigint, p_is_pooled boolean,
    OUT now bigint, OUT has_lease boolean
)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_is_pooled THEN
        PERFORM set_config(name, 'off', true) FROM unnest(array[
            'enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin', 'jit'
        ]) AS setting (name);
        PERFORM set_config('plan_cache_mode', 'force_generic_plan', true);
    END IF;
    IF p_has_gates THEN
        PERFORM pg_advisory_xact_lock({schema}.lock_key('gates'));
    END IF;
    IF p_owner IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared({schema}.lock_key(p_owner));
    END IF;
    has_lease := EXISTS (SELECT FROM {schema}.leases WHERE owner = p_owner AND NOT fenced);
    now := {schema}.micros(p_now);
END $$;

-- Write the state of live tasks; the caller has locked them. All arrays have one element for each task.
CREATE OR REPLACE FUNCTION {schema}.save(
    p_now bigint, p_ids text[], p_dues bigint[], p_visibles bigint[], p_statuses smallint[],
    p_attempts bigint[], p_crashes int[], p_releases int[], p_tokens bigint[],
    p_settled bigint[], p_owners text[], p_started bigint[], p_cancels boolean[],
    p_parked text[], p_lots text[], p_attached boolean[], p_histories bytea[],
    p_claim_ids text[]
) RETURNS void
LANGUAGE sql VOLATILE AS $$
    UPDATE {schema}.live
    SET due = given.due, visible = given.visible, status = given.status,
        attempts = given.attempts, crashes = given.crashes, releases = given.releases,
        token = given.token, settled = given.settled, owner = given.owner,
        started_at = given.started_at, cancel_requested = given.cancel_requested,
        parked = given.parked, lot = given.lot, attached = given.attached,
        history = given.history,
        claim_id = CASE WHEN given.owner IS NULL THEN NULL ELSE coalesce(given.claim_id, live.claim_id) END,
        place = CASE WHEN given.owner IS NOT NULL THEN 4 ELSE {schema}.place_of(
            given.visible, p_now, given.parked IS NOT NULL, given.crashes > 0, live.gates IS NOT NULL
        ) END
    FROM unnest(
        p_ids, p_dues, p_visibles, p_statuses, p_attempts, p_crashes, p_releases, p_tokens,
        p_settled, p_owners, p_started, p_cancels, p_parked, p_lots, p_attached, p_histories,
        p_claim_ids
    ) AS given (
        id, due, visible, status, attempts, crashes, releases, token, settled, owner, started_at,
        cancel_requested, parked, lot, attached, history, claim_id
    )
    WHERE live.id = given.id
$$;

-- End tasks: move them from `live` to `finished` for their result_ttl, and delete what was attached.
-- p_letters    the dead letter of each task, or NULL
-- p_failed_at  the time of its last failure
-- p_reasons    the reason of its last failure
CREATE OR REPLACE FUNCTION {schema}.finish(
    p_now bigint, p_ids text[], p_statuses smallint[], p_attempts bigint[], p_crashes int[],
    p_settled bigint[], p_histories bytea[], p_results bytea[], p_letters bytea[],
    p_failed_at bigint[], p_reasons text[]
) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    WITH deleted AS (
        DELETE FROM {schema}.live
        USING unnest(
            p_ids, p_statuses, p_attempts, p_crashes, p_settled, p_histories, p_results,
            p_letters, p_failed_at, p_reasons
        ) AS given (
            id, status, attempts, crashes, settled, history, result, letter, failed_at, reason
        )
        WHERE live.id = given.id
        RETURNING
            live.seq, live.rank, live.due, live.visible, live.created_at, given.attempts,
            live.token, given.settled, live.started_at, live.result_ttl, live.expires,
            given.crashes, live.releases, given.status, live.cancel_requested, live.repeats,
            live.id, live.nonce, live.queue, live.func_path, live.unique_key, live.gates,
            given.history, live.body, live.attached, given.result, given.letter, given.failed_at,
            given.reason
    ),
    stored AS (
        INSERT INTO {schema}.finished (
            seq, rank, due, visible, created_at, attempts, token, settled, started_at, result_ttl,
            expires, crashes, releases, status, cancel_requested, repeats, id, nonce, queue,
            func_path, unique_key, gates, history, body, finished_at, expires_at, result
        )
        SELECT
            seq, rank, due, visible, created_at, attempts, token, settled, started_at, result_ttl,
            expires, crashes, releases, status, cancel_requested, repeats, id, nonce, queue,
            func_path, unique_key, gates, history, body, p_now, p_now + result_ttl, result
        FROM deleted WHERE result_ttl > 0
    ),
    dead_letters AS (
        INSERT INTO {schema}.dead (
            seq, rank, due, visible, created_at, attempts, token, settled, started_at, result_ttl,
            expires, crashes, releases, status, cancel_requested, repeats, id, nonce, queue,
            func_path, unique_key, gates, history, body, last_failure, reason, letter
        )
        SELECT
            seq, rank, due, visible, created_at, attempts, token, settled, started_at, result_ttl,
            expires, crashes, releases, status, cancel_requested, repeats, id, nonce, queue,
            func_path, unique_key, gates, history, body, failed_at, reason, letter
        FROM deleted WHERE letter IS NOT NULL
    ),
    without_progress AS (
        DELETE FROM {schema}.progress USING deleted
        WHERE progress.id = deleted.id AND deleted.attached
    ),
    without_newest AS (
        DELETE FROM {schema}.newest USING deleted
        WHERE newest.id = deleted.id AND deleted.attached
    )
    DELETE FROM {schema}.checkpoints USING deleted
    WHERE checkpoints.id = deleted.id AND deleted.attached AND deleted.letter IS NULL;
    PERFORM {schema}.tell_of_results(p_ids);
END $$;

-- Renew an owner's lease, or refuse if the owner is fenced.
-- p_lease      the length of the lease in microseconds, from now
-- p_info       the encoded WorkerInfo
-- p_is_first   only the first renewal inserts a row: an owner whose fence was deleted cannot come back
-- p_lease_now  the time on the clock of leases, NULL for the server's
-- returns      whether the owner has a lease now; the ids and tokens of the tasks it holds, and for each
--              whether it was cancelled
CREATE OR REPLACE FUNCTION {schema}.renew(
    p_owner text, p_lease bigint, p_info bytea, p_is_first boolean, p_now bigint,
    p_lease_now bigint,
    OUT is_renewed boolean, OUT ids text[], OUT tokens bigint[], OUT cancelled boolean[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_until bigint := {schema}.micros(p_lease_now) + p_lease;
    v_at bigint := {schema}.micros(p_now);
BEGIN
    UPDATE {schema}.leases SET until = v_until, at = v_at, info = p_info
    WHERE owner = p_owner AND NOT fenced;
    IF NOT FOUND AND p_is_first THEN
        INSERT INTO {schema}.leases VALUES (p_owner, v_until, false, v_at, p_info)
        ON CONFLICT (owner) DO UPDATE SET until = v_until, at = v_at, info = p_info
        WHERE NOT leases.fenced;
    END IF;
    is_renewed := FOUND;
    SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(token), '{}'),
        coalesce(array_agg(cancel_requested), '{}')
    INTO ids, tokens, cancelled
    FROM {schema}.live WHERE place = 4 AND owner = p_owner;
END $$;

-- The owners that hold tasks: skips from one name to the next in the index.
CREATE OR REPLACE FUNCTION {schema}.holders() RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    WITH RECURSIVE holders (name) AS (
        (SELECT owner FROM {schema}.live WHERE place = 4 ORDER BY owner LIMIT 1)
        UNION ALL
        SELECT (
            SELECT owner FROM {schema}.live WHERE place = 4 AND owner > name ORDER BY owner LIMIT 1
        )
        FROM holders WHERE name IS NOT NULL
    )
    SELECT array(SELECT name FROM holders WHERE name IS NOT NULL)
$$;

-- Owners whose tasks have to be recovered: their lease has expired, or they hold tasks without a lease.
CREATE OR REPLACE FUNCTION {schema}.without_lease(p_lease_now bigint) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    SELECT array(
        SELECT owner FROM {schema}.leases WHERE NOT fenced
            AND until <= (SELECT {schema}.micros(p_lease_now))
        UNION
        SELECT name FROM unnest({schema}.holders()) AS holders (name)
        WHERE NOT EXISTS (SELECT FROM {schema}.leases WHERE owner = name AND NOT fenced)
        ORDER BY 1
    )
$$;

-- Fence an owner, unless it has a lease or is claiming right now; returns whether it is fenced.
-- The caller's transaction must end soon: the owner's claims wait for it.
-- p_is_retiring  the owner itself gives up its lease: wait for its claims, and fence it in any case
CREATE OR REPLACE FUNCTION {schema}.fence(
    p_owner text, p_now bigint, p_lease_now bigint, p_is_retiring boolean
) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_at bigint := {schema}.micros(p_now);
BEGIN
    IF p_is_retiring THEN
        PERFORM pg_advisory_xact_lock({schema}.lock_key(p_owner));
    ELSIF NOT pg_try_advisory_xact_lock({schema}.lock_key(p_owner)) THEN
        RETURN false;
    END IF;
    INSERT INTO {schema}.leases VALUES (p_owner, 0, true, v_at, NULL)
    ON CONFLICT (owner) DO UPDATE SET fenced = true, at = v_at
    WHERE leases.fenced OR p_is_retiring OR leases.until <= {schema}.micros(p_lease_now);
    RETURN FOUND;
END $$;

-- Begin to wait for work: from here on enqueues notify this store's channel. Then check for work.
-- Holds the shared lock 'work' until it is released or the connection ends.
-- p_queues  the queues to check, NULL for all
-- p_is_new  whether to take the lock; false when this connection holds it already
-- returns   whether there is something to claim, and when the next task is due
CREATE OR REPLACE FUNCTION {schema}.await_work(
    p_queues text[], p_is_new boolean, p_now bigint, OUT has_work boolean, OUT next_due bigint
)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    IF p_is_new THEN
        PERFORM pg_advisory_lock_shared({schema}.lock_key('work'));
    END IF;
    SELECT min(visible) INTO next_due FROM {schema}.live WHERE place = 2;
    has_work := coalesce(next_due <= {schema}.micros(p_now), false)
        OR cardinality({schema}.queues_in(0::smallint, p_queues)) > 0;
END $$;
