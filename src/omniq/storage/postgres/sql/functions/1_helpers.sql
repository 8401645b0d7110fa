-- Helpers that the other functions share.
-- {schema}   the store's schema
-- {channel}  the channel on which its storages are notified

-- The time in microseconds: the one given, or the server's if that is NULL.
CREATE OR REPLACE FUNCTION {schema}.micros(p_given bigint) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(p_given, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

-- The key of an advisory lock of this store.
CREATE OR REPLACE FUNCTION {schema}.lock_key(p_what text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtextextended('omniq {schema} ' || p_what, 0)
$$;

-- Whether any storage waits for 'work' or 'results': a storage that waits holds the lock shared, so that
-- the lock cannot be taken exclusively.
CREATE OR REPLACE FUNCTION {schema}.is_awaited(p_what text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF pg_try_advisory_lock({schema}.lock_key(p_what)) THEN
        PERFORM pg_advisory_unlock({schema}.lock_key(p_what));
        RETURN false;
    END IF;
    RETURN true;
END $$;

-- Notify the storages that wait for work: there is some now (p_visible = 0), or from that instant on.
CREATE OR REPLACE FUNCTION {schema}.tell_of_work(p_visible bigint) RETURNS void
LANGUAGE sql VOLATILE AS $$
    SELECT pg_notify('{channel}', 'w' || p_visible)
$$;

-- Notify the storages that wait for results that these tasks may have ended. A message has at most 8,000
-- bytes; one without ids concerns all tasks.
CREATE OR REPLACE FUNCTION {schema}.tell_of_results(p_ids text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids text := array_to_string(p_ids, ' ');
BEGIN
    IF v_ids <> '' AND {schema}.is_awaited('results') THEN
        PERFORM pg_notify('{channel}', 'r' || CASE WHEN octet_length(v_ids) < 7000 THEN v_ids ELSE '' END);
    END IF;
END $$;

-- The `place` of a task that no owner holds. See the table `live`.
CREATE OR REPLACE FUNCTION {schema}.place_of(
    p_visible bigint, p_now bigint, p_is_parked boolean, p_is_suspect boolean, p_has_gates boolean
) RETURNS smallint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (CASE
        WHEN p_visible > p_now THEN 2
        WHEN p_is_parked THEN 3
        WHEN p_is_suspect THEN 1
        WHEN p_has_gates THEN 5
        ELSE 0
    END)::smallint
$$;
