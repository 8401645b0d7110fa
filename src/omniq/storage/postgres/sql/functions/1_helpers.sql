-- Helpers that the other functions share.
-- {schema}    the store's schema
-- {pinned}    has a function find functions and operators in pg_catalog alone, whatever its caller's search_path is:
--             a user who may create functions in another schema must not run SQL as the user that calls these
-- {settings}  the same, and has the function's statements use the indexes: see `statements.py`
--
-- `micros`, `ids_of`, `lock_key`, `place_of` and `fitting` are not pinned: PostgreSQL could not expand them in the
-- statements that use them. They name the schema of everything that they use.

-- The time in microseconds: the one given, or the server's if that is NULL.
CREATE OR REPLACE FUNCTION {schema}.micros(p_given bigint) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(
        p_given,
        (extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000::numeric)::bigint
    )
$$;

-- Ids that were sent as an array, or as the text of an array in its only element: the driver takes longer for an array
-- of many elements. No id begins with a brace.
CREATE OR REPLACE FUNCTION {schema}.ids_of(p_ids text[]) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN pg_catalog.starts_with(p_ids[1], '{') THEN p_ids[1]::pg_catalog.text[] ELSE p_ids END
$$;

-- The key of an advisory lock of this store.
CREATE OR REPLACE FUNCTION {schema}.lock_key(p_what text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.hashtextextended('omniq {schema} ' OPERATOR(pg_catalog.||) p_what, 0::bigint)
$$;

-- A value, or nothing of one that is too large to be sent: `largest_value` in Python. The session's setting is read
-- only for a large one; a session without it is that of a pooler, or of a user.
CREATE OR REPLACE FUNCTION {schema}.fitting(p_value bytea) RETURNS bytea
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN pg_catalog.octet_length(p_value) OPERATOR(pg_catalog.<=) 4194304 THEN p_value
        WHEN pg_catalog.octet_length(p_value) OPERATOR(pg_catalog.<=)
            coalesce(pg_catalog.current_setting('omniq.largest', true), '67108864')::int THEN p_value
        ELSE ''::bytea
    END
$$;

-- Whether any storage waits for 'work' or 'results': a storage that waits holds the lock shared, so that
-- the lock cannot be taken exclusively.
CREATE OR REPLACE FUNCTION {schema}.is_awaited(p_what text) RETURNS boolean
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    IF pg_try_advisory_lock({schema}.lock_key(p_what)) THEN
        PERFORM pg_advisory_unlock({schema}.lock_key(p_what));
        RETURN false;
    END IF;
    RETURN true;
END $$;

-- Notify the storages of this store.
CREATE OR REPLACE FUNCTION {schema}.notify(p_message text) RETURNS void
LANGUAGE sql VOLATILE {pinned} AS $$
    SELECT pg_notify(name, p_message) FROM {schema}.channel
$$;

-- Notify the storages that wait for work: there is some now (p_visible = 0), or from that instant on.
CREATE OR REPLACE FUNCTION {schema}.tell_of_work(p_visible bigint) RETURNS void
LANGUAGE sql VOLATILE {pinned} AS $$
    SELECT {schema}.notify('w' || p_visible)
$$;

-- Notify the storages that wait for results that these tasks may have ended. A message has at most 8,000
-- bytes; one without ids concerns all tasks.
CREATE OR REPLACE FUNCTION {schema}.tell_of_results(p_ids text[]) RETURNS void
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    v_ids text := array_to_string(p_ids, ' ');
BEGIN
    IF v_ids <> '' AND {schema}.is_awaited('results') THEN
        PERFORM {schema}.notify('r' || CASE WHEN octet_length(v_ids) < 7000 THEN v_ids ELSE '' END);
    END IF;
END $$;

-- The `place` of a task: `place_of` in Python. See the table `live`.
CREATE OR REPLACE FUNCTION {schema}.place_of(
    p_owner text, p_visible bigint, p_now bigint, p_parked text, p_crashes integer
) RETURNS smallint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (CASE
        WHEN p_owner IS NOT NULL THEN 4
        WHEN p_visible OPERATOR(pg_catalog.>) p_now THEN 2
        WHEN p_parked IS NOT NULL THEN 3
        WHEN p_crashes OPERATOR(pg_catalog.>) 0 THEN 1
        ELSE 0
    END)::smallint
$$;

-- Refuse the changes of a section, because what it has read was changed meanwhile: nothing is written.
CREATE OR REPLACE FUNCTION {schema}.refuse_moved() RETURNS void
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    RAISE EXCEPTION 'changed meanwhile' USING ERRCODE = 'OQ001';
END $$;

-- The first token of the epoch of the lease of an owner that is about to claim; NULL if it has no lease. A
-- transaction that fences the owner waits until this one ends, or this one sees the fence.
CREATE OR REPLACE FUNCTION {schema}.first_token(p_owner text) RETURNS bigint
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({schema}.lock_key(p_owner));
    RETURN (SELECT epoch << 21 FROM {schema}.leases WHERE owner = p_owner AND NOT fenced);
END $$;

-- Begin an epoch: every lease ends, and the numbers of new tasks start above all earlier ones.
CREATE OR REPLACE FUNCTION {schema}.begin_epoch(p_epoch bigint) RETURNS void
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    UPDATE {schema}.leases SET fenced = true WHERE NOT fenced AND epoch < p_epoch;
    PERFORM setval('{schema}.seq', greatest(nextval('{schema}.seq'), p_epoch << 21));
END $$;
