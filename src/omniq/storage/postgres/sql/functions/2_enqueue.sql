-- Enqueue: insert tasks, check ids, unique keys and the bound on waiting tasks.
-- {schema}  the store's schema

-- Insert tasks in the order given, or refuse all of them. All arrays have one element for each task,
-- with two exceptions: a required column whose value is the same for all tasks may have a single
-- element, and an optional column that no task sets is empty.
-- p_nonces       the nonce of the call that each task came with: a repeat has the same one
-- p_ids … p_gates  the columns of `live` of the same name
-- p_now          the store's time, NULL for the server's
-- p_max_pending  the largest number of waiting tasks, or NULL for no bound
-- p_is_certain   whether to notify even if no storage waits now: one may begin to wait before the commit
-- returns        refusal 'duplicate' (detail: the id), 'full', or NULL and in `ids` the id for each task,
--                which for a unique key that is held is the id of its holder
CREATE OR REPLACE FUNCTION {schema}.enqueue(
    p_nonces text[], p_ids text[], p_queues text[], p_ranks bigint[], p_func_paths text[],
    p_bodies bytea[], p_dues bigint[], p_visibles bigint[], p_created bigint[],
    p_attempts bigint[], p_repeats boolean[], p_uniques text[], p_expires bigint[],
    p_ttls bigint[], p_gates bytea[], p_now bigint, p_max_pending bigint, p_is_certain boolean,
    OUT refusal text, OUT detail text, OUT ids text[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now bigint := {schema}.micros(p_now);
    v_checks_first boolean := p_max_pending IS NOT NULL
        OR cardinality(array_remove(p_uniques, NULL)) > 0;
    v_fresh text[] := p_ids;
    v_attempts_left int := 20;
BEGIN
    ids := p_ids;
    IF p_max_pending IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock({schema}.lock_key('room'));
    END IF;
    LOOP
        IF v_checks_first THEN
            SELECT * INTO detail, ids, v_fresh
            FROM {schema}.sort_out(p_nonces, p_ids, p_uniques, v_now);
            IF detail IS NOT NULL THEN
                refusal := 'duplicate';
                RETURN;
            END IF;
            IF NOT {schema}.has_room(cardinality(v_fresh), p_max_pending) THEN
                refusal := 'full';
                RETURN;
            END IF;
            DELETE FROM {schema}.finished AS old WHERE old.id = ANY (v_fresh) AND expires_at <= v_now;
        END IF;
        BEGIN
            INSERT INTO {schema}.live (
                id, nonce, queue, rank, func_path, body, due, visible, created_at, attempts,
                repeats, unique_key, expires, result_ttl, gates, place
            )
            SELECT
                given.id, coalesce(given.nonce, p_nonces[1]), coalesce(given.queue, p_queues[1]),
                coalesce(rank, p_ranks[1]), coalesce(func_path, p_func_paths[1]),
                coalesce(body, p_bodies[1]), coalesce(due, p_dues[1]),
                coalesce(visible, p_visibles[1]), coalesce(created_at, p_created[1]),
                coalesce(attempts, p_attempts[1]), coalesce(repeats, p_repeats[1]), unique_key,
                expires, coalesce(ttl, p_ttls[1]), gates,
                {schema}.place_of(
                    coalesce(visible, p_visibles[1]), v_now, false, false, gates IS NOT NULL
                )
            FROM unnest(
                p_nonces, p_ids, p_queues, p_ranks, p_func_paths, p_bodies, p_dues, p_visibles,
                p_created, p_attempts, p_repeats, p_uniques, p_expires, p_ttls, p_gates
            ) WITH ORDINALITY AS given (
                nonce, id, queue, rank, func_path, body, due, visible, created_at, attempts, repeats,
                unique_key, expires, ttl, gates, number
            )
            WHERE NOT v_checks_first OR given.id = ANY (v_fresh)
            ORDER BY given.number;
            -- Checked after the insert: a task with that id may have ended while the insert waited.
            IF EXISTS (SELECT FROM {schema}.finished AS ended WHERE ended.id = ANY (v_fresh))
                OR EXISTS (SELECT FROM {schema}.dead AS ended WHERE ended.id = ANY (v_fresh))
            THEN
                RAISE unique_violation;
            END IF;
            EXIT;
        EXCEPTION WHEN unique_violation THEN
            -- Another transaction has inserted the id or the key and has committed: check again.
            v_checks_first := true;
            v_attempts_left := v_attempts_left - 1;
            IF v_attempts_left = 0 THEN
                RAISE;
            END IF;
        END;
    END LOOP;
    IF cardinality(v_fresh) > 0 AND (p_is_certain OR {schema}.is_awaited('work')) THEN
        PERFORM {schema}.tell_of_work((SELECT min(visible) FROM unnest(p_visibles) AS visible));
    END IF;
END $$;

-- Insert one task, unless its id or unique key is in use: half the cost of a batch of one. The parameters
-- are those of `enqueue` for a single task.
-- returns  false when a stored task has its id or its unique key: nothing was inserted, call `enqueue`
CREATE OR REPLACE FUNCTION {schema}.enqueue_one(
    p_nonce text, p_id text, p_queue text, p_rank bigint, p_func_path text, p_body bytea,
    p_due bigint, p_visible bigint, p_created bigint, p_attempts bigint, p_repeats boolean,
    p_unique text, p_expires bigint, p_ttl bigint, p_gates bytea, p_now bigint
) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO {schema}.live (
        id, nonce, queue, rank, func_path, body, due, visible, created_at, attempts, repeats,
        unique_key, expires, result_ttl, gates, place
    )
    VALUES (
        p_id, p_nonce, p_queue, p_rank, p_func_path, p_body, p_due, p_visible, p_created,
        p_attempts, p_repeats, p_unique, p_expires, p_ttl, p_gates,
        {schema}.place_of(p_visible, {schema}.micros(p_now), false, false, p_gates IS NOT NULL)
    )
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- Checked after the insert: a task with that id may have ended while the insert waited.
    IF EXISTS (SELECT FROM {schema}.finished AS ended WHERE ended.id = p_id)
        OR EXISTS (SELECT FROM {schema}.dead AS ended WHERE ended.id = p_id)
    THEN
        DELETE FROM {schema}.live WHERE id = p_id;
        RETURN false;
    END IF;
    IF {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(p_visible);
    END IF;
    RETURN true;
END $$;

-- Compare the ids and unique keys of a batch with those that are stored.
-- returns  taken: the first id that another call has enqueued, or NULL
--          ids: for each task its own id, or the id of the task that holds its unique key
--          fresh: the ids of the tasks to insert
CREATE OR REPLACE FUNCTION {schema}.sort_out(
    p_nonces text[], p_ids text[], p_uniques text[], p_now bigint,
    OUT taken text, OUT ids text[], OUT fresh text[]
)
LANGUAGE sql VOLATILE AS $$
    WITH given AS (
        SELECT id, unique_key, number, coalesce(own, p_nonces[1]) AS own, coalesce(
            (SELECT nonce FROM {schema}.live WHERE live.id = given.id),
            (SELECT nonce FROM {schema}.dead WHERE dead.id = given.id),
            (SELECT nonce FROM {schema}.finished AS f WHERE f.id = given.id AND f.expires_at > p_now)
        ) AS nonce
        FROM unnest(p_nonces, p_ids, p_uniques)
            WITH ORDINALITY AS given (own, id, unique_key, number)
    ),
    held AS (
        SELECT id, number, nonce, own, CASE WHEN unique_key IS NOT NULL AND nonce IS NULL THEN coalesce(
            (SELECT live.id FROM {schema}.live WHERE live.unique_key = given.unique_key),
            first_value(id) OVER (PARTITION BY unique_key, nonce IS NULL ORDER BY number)
        ) ELSE id END AS holder
        FROM given
    )
    SELECT
        (array_agg(id ORDER BY number) FILTER (WHERE nonce <> own))[1],
        array_agg(holder ORDER BY number),
        coalesce(array_agg(id ORDER BY number) FILTER (WHERE nonce IS NULL AND holder = id), '{}')
    FROM held
$$;

-- Whether p_more tasks may be added to those that wait. The caller holds the lock 'room'.
CREATE OR REPLACE FUNCTION {schema}.has_room(p_more bigint, p_max_pending bigint) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT p_max_pending IS NULL OR p_more = 0 OR p_more + (
        SELECT count(*) FROM (
            SELECT FROM {schema}.live WHERE place <> 4 LIMIT p_max_pending
        ) AS waiting
    ) <= p_max_pending
$$;

-- `enqueue` for any driver: one text in, one text out, both JSON. Binary values are in base64.
-- p_request  {"store": id, "now", "max_pending", "tasks": [{nonce, id, queue, …}, …]}
-- returns    {"refusal", "detail", "ids"}; the refusal 'store' when this is another store
CREATE OR REPLACE FUNCTION {schema}.enqueue_text(p_request text) RETURNS text
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_request jsonb := p_request::jsonb;
    v_answer text;
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.store WHERE id::text = v_request ->> 'store') THEN
        RETURN '{"refusal": "store"}';
    END IF;
    SELECT to_jsonb(answer)::text INTO v_answer
    FROM (
        SELECT
            array_agg(nonce) AS nonces, array_agg(id) AS ids, array_agg(queue) AS queues,
            array_agg(rank) AS ranks,
            array_agg(func_path) AS func_paths, array_agg(decode(body, 'base64')) AS bodies,
            array_agg(due) AS dues, array_agg(visible) AS visibles,
            array_agg(created_at) AS created, array_agg(attempts) AS attempts,
            array_agg(repeats) AS repeats, array_agg(unique_key) AS uniques,
            array_agg(expires) AS expires, array_agg(result_ttl) AS ttls,
            array_agg(decode(gates, 'base64')) AS gates
        FROM jsonb_to_recordset(v_request -> 'tasks') AS task (
            nonce text, id text, queue text, rank bigint, func_path text, body text, due bigint,
            visible bigint, created_at bigint, attempts bigint, repeats boolean, unique_key text,
            expires bigint, result_ttl bigint, gates text
        )
    ) AS tasks, LATERAL {schema}.enqueue(
        nonces, ids, queues, ranks, func_paths, bodies, dues, visibles, created,
        attempts, repeats, uniques, expires, ttls, gates, (v_request ->> 'now')::bigint,
        (v_request ->> 'max_pending')::bigint, true
    ) AS answer;
    RETURN v_answer;
END $$;
