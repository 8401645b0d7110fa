-- Leases and fences; waiting for work.
-- {schema}  the store's schema

-- Renew an owner's lease, or refuse if the owner is fenced or knows more than the store: see `Backend.renew`.
-- p_length     the length of the lease in microseconds, from now
-- p_info       the encoded WorkerInfo
-- p_epoch, p_beat  what the owner knows. Only the first renewal, which has the beat 0, inserts a row: an owner
--              whose fence was deleted cannot come back
-- p_now        the time, NULL for the server's
-- p_lease_now  the time on the clock of leases, NULL for the server's
-- returns      whether the owner has a lease now, and is paused; the time; the ids and tokens of the tasks it
--              holds, and for each whether it was cancelled; the store's epoch, the lease's beat (0 if the owner
--              is unknown), and the store's record
CREATE OR REPLACE FUNCTION {schema}.renew(
    p_owner text, p_length bigint, p_info bytea, p_epoch bigint, p_beat bigint, p_now bigint,
    p_lease_now bigint,
    OUT is_renewed boolean, OUT is_paused boolean, OUT at bigint, OUT ids text[],
    OUT tokens bigint[], OUT cancelled boolean[], OUT store_epoch bigint, OUT lease_beat bigint,
    OUT store bytea
)
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_until bigint := {schema}.micros(p_lease_now) + p_length;
BEGIN
    at := {schema}.micros(p_now);
    SELECT due, data INTO store_epoch, store FROM {schema}.documents WHERE kind = 'store' AND key = 'store';
    store_epoch := coalesce(store_epoch, 0);
    UPDATE {schema}.leases
    SET until = v_until, at = renew.at, info = p_info, length = p_length, beat = beat + 1
    WHERE owner = p_owner AND NOT fenced AND epoch = store_epoch AND beat >= p_beat
        AND (p_epoch = store_epoch OR p_beat = 0 AND p_epoch < store_epoch)
    RETURNING paused, beat INTO is_paused, lease_beat;
    is_renewed := FOUND;
    IF NOT FOUND AND p_beat = 0 AND p_epoch <= store_epoch THEN
        -- Locked, so that an epoch that begins now either is seen here or ends the new lease too.
        SELECT due, data INTO store_epoch, store FROM {schema}.documents
        WHERE kind = 'store' AND key = 'store' FOR SHARE;
        store_epoch := coalesce(store_epoch, 0);
        INSERT INTO {schema}.leases (owner, until, fenced, at, info, length, epoch, beat)
        VALUES (p_owner, v_until, false, at, p_info, p_length, store_epoch, 1)
        -- Two first renewals may be made at the same time.
        ON CONFLICT (owner) DO UPDATE SET until = v_until, at = excluded.at, info = p_info
        WHERE NOT leases.fenced;
        is_renewed := FOUND;
        is_paused := false;
        lease_beat := 1;
    END IF;
    IF NOT is_renewed THEN
        lease_beat := coalesce((SELECT beat FROM {schema}.leases WHERE owner = p_owner), 0);
    END IF;
    SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(token), '{}'),
        coalesce(array_agg(cancel_requested), '{}')
    INTO ids, tokens, cancelled
    FROM {schema}.live WHERE place = 4 AND owner = p_owner;
END $$;

-- The owners that hold tasks: skips from one name to the next in the index.
CREATE OR REPLACE FUNCTION {schema}.holders() RETURNS text[]
LANGUAGE sql VOLATILE {settings} AS $$
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

-- The leases that are not fenced, and owners that hold tasks without one: they have no `info`.
-- p_lease_now  the time on the clock of leases, NULL for the server's
CREATE OR REPLACE FUNCTION {schema}.all_leases(p_lease_now bigint) RETURNS TABLE (
    owner text, info bytea, paused boolean, until bigint, length bigint, now bigint
)
LANGUAGE plpgsql VOLATILE {settings} AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := {schema}.micros(p_lease_now);
BEGIN
    RETURN QUERY
    SELECT leases.owner, leases.info, leases.paused, leases.until, leases.length, v_now
    FROM {schema}.leases WHERE NOT fenced
    UNION ALL
    SELECT holder, NULL, false, 0, 0, 0 FROM unnest({schema}.holders()) AS holder
    WHERE NOT EXISTS (SELECT FROM {schema}.leases WHERE leases.owner = holder AND NOT fenced)
    ORDER BY 1;
END $$;

-- Fence an owner, unless it has a lease or is claiming right now; returns whether it is fenced. The row of
-- a fenced owner is stored for a day at least: longer than any request can be delayed.
-- p_is_retiring  the owner itself gives up its lease: wait for its claims, and fence it in any case
CREATE OR REPLACE FUNCTION {schema}.fence(
    p_owner text, p_now bigint, p_lease_now bigint, p_is_retiring boolean
) RETURNS boolean
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_at bigint := {schema}.micros(p_now);
BEGIN
    IF p_is_retiring THEN
        PERFORM pg_advisory_xact_lock({schema}.lock_key(p_owner));
    ELSIF NOT pg_try_advisory_xact_lock({schema}.lock_key(p_owner)) THEN
        RETURN false;
    END IF;
    DELETE FROM {schema}.leases
    WHERE fenced AND at < v_at - 86400000000 AND owner <> p_owner AND NOT EXISTS (
        SELECT FROM {schema}.live WHERE place = 4 AND live.owner = leases.owner
    );
    INSERT INTO {schema}.leases (owner, until, fenced, at) VALUES (p_owner, 0, true, v_at)
    ON CONFLICT (owner) DO UPDATE SET fenced = true, at = v_at
    WHERE leases.fenced OR p_is_retiring OR leases.until <= {schema}.micros(p_lease_now);
    RETURN FOUND;
END $$;

-- Begin to wait for work: from here on enqueues notify this store's channel. Then check for work.
-- Holds the shared lock 'work' until it is released or the connection ends.
-- p_is_new  whether to take the lock; false when this connection holds it already
-- returns   whether there is something to claim of what is wanted, and when the next task is due
CREATE OR REPLACE FUNCTION {schema}.await_work(
    p_wanted {schema}.wanted_tasks, p_is_new boolean, p_now bigint,
    OUT has_work boolean, OUT next_due bigint
)
LANGUAGE plpgsql VOLATILE {settings} AS $$
BEGIN
    IF p_is_new THEN
        PERFORM pg_advisory_lock_shared({schema}.lock_key('work'));
    END IF;
    next_due := {schema}.next_due(-1);
    has_work := coalesce(next_due <= {schema}.micros(p_now), false) OR cardinality((
        SELECT functions FROM {schema}.lanes(
            0::smallint, p_wanted,
            array(SELECT key FROM {schema}.documents WHERE kind = 'paused_queue')
        )
    )) > 0;
END $$;
