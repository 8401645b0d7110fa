-- Claim: which queues and lots to search, and how to lock tasks that need no rule.
-- {schema}  the store's schema

-- The queues that have a task in that place, of those requested (NULL: all), without the paused ones.
CREATE OR REPLACE FUNCTION {schema}.queues_in(p_place smallint, p_queues text[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_name text;
    v_has_others boolean;
    v_is_paused boolean;
BEGIN
    IF p_queues IS NOT NULL THEN
        RETURN array(
            SELECT name FROM unnest(p_queues) AS requested (name)
            WHERE EXISTS (
                SELECT FROM {schema}.live
                WHERE place = p_place AND place IN (0, 1, 5) AND queue = name
            ) AND NOT EXISTS (SELECT FROM {schema}.paused WHERE paused.queue = name)
        );
    END IF;
    -- The last name, and whether there is another one: usually there is none. Read from the far end of
    -- the index, where claims leave no dead entries.
    SELECT last.queue, EXISTS (
        SELECT FROM {schema}.live
        WHERE place = p_place AND place IN (0, 1, 5) AND queue < last.queue
    ), EXISTS (SELECT FROM {schema}.paused WHERE paused.queue = last.queue)
    INTO v_name, v_has_others, v_is_paused
    FROM (
        SELECT queue FROM {schema}.live
        WHERE place = p_place AND place IN (0, 1, 5) ORDER BY queue DESC LIMIT 1
    ) AS last;
    IF v_has_others IS NOT TRUE THEN
        RETURN CASE WHEN v_name IS NULL OR v_is_paused THEN '{}' ELSE array[v_name] END;
    END IF;
    -- Skip from one name to the next in the index: one lookup for each queue, not for each task.
    RETURN array(
        WITH RECURSIVE names (name) AS (
            (
                SELECT queue FROM {schema}.live
                WHERE place = p_place AND place IN (0, 1, 5) ORDER BY queue LIMIT 1
            )
            UNION ALL
            SELECT (
                SELECT queue FROM {schema}.live
                WHERE place = p_place AND place IN (0, 1, 5) AND queue > name
                ORDER BY queue LIMIT 1
            )
            FROM names WHERE name IS NOT NULL
        )
        SELECT name FROM names
        WHERE name IS NOT NULL
            AND NOT EXISTS (SELECT FROM {schema}.paused WHERE paused.queue = name)
    );
END $$;

-- The lots of parked tasks that a claim may take from: of the requested queues, and under a gate that may
-- have room.
-- p_takes_suspect  whether the claim may take a suspect: an owner holds at most one
CREATE OR REPLACE FUNCTION {schema}.awake_lots(
    p_queues text[], p_now bigint, p_takes_suspect boolean
) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    WITH RECURSIVE lots (lot) AS (
        (SELECT lot FROM {schema}.live WHERE place = 3 ORDER BY lot LIMIT 1)
        UNION ALL
        SELECT (
            SELECT lot FROM {schema}.live WHERE place = 3 AND lot > lots.lot ORDER BY lot LIMIT 1
        )
        FROM lots WHERE lots.lot IS NOT NULL
    )
    SELECT coalesce(array_agg(lots.lot), '{}')
    FROM lots, LATERAL (
        SELECT queue, parked FROM {schema}.live WHERE place = 3 AND lot = lots.lot LIMIT 1
    ) AS first
    WHERE (p_queues IS NULL OR first.queue = ANY (p_queues))
        AND (p_takes_suspect OR lots.lot LIKE '0/%')
        AND NOT EXISTS (SELECT FROM {schema}.paused WHERE paused.queue = first.queue)
        AND NOT EXISTS (SELECT FROM {schema}.gates WHERE key = first.parked AND wake_at > p_now)
$$;

-- Move tasks that are due to the place where claims search, the earliest first; returns their number.
CREATE OR REPLACE FUNCTION {schema}.promote(p_due_by bigint, p_limit int) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    WITH moved AS (
        UPDATE {schema}.live
        SET place = {schema}.place_of(0, 0, lot IS NOT NULL, crashes > 0, gates IS NOT NULL)
        WHERE id = ANY (array(
            SELECT id FROM {schema}.live WHERE place = 2 AND visible <= p_due_by
            ORDER BY visible LIMIT p_limit FOR UPDATE SKIP LOCKED
        ))
        RETURNING 1
    )
    SELECT count(*) FROM moved
$$;

-- Where a claim has to search. First moves the tasks that are due.
-- returns  is_partial: more tasks are due than one transaction may move, call again;
--          ready, gated, suspects: the queues with ordinary tasks, with gated ones, with suspects;
--          lots: the lots of parked tasks
CREATE OR REPLACE FUNCTION {schema}.survey(
    p_owner text, p_queues text[], p_limit int, p_now bigint, p_due_by bigint,
    OUT is_partial boolean, OUT ready text[], OUT gated text[], OUT suspects text[], OUT lots text[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_moved bigint;
    v_is_due boolean;
    v_has_gated_or_suspect boolean;
    v_has_parked boolean;
    v_takes_suspect boolean;
BEGIN
    is_partial := false;
    gated := '{}';
    suspects := '{}';
    lots := '{}';
    SELECT
        EXISTS (SELECT FROM {schema}.live WHERE place = 2 AND visible <= p_due_by),
        EXISTS (SELECT FROM {schema}.live WHERE place > 0 AND place IN (0, 1, 5)),
        EXISTS (SELECT FROM {schema}.live WHERE place = 3)
    INTO v_is_due, v_has_gated_or_suspect, v_has_parked;
    IF v_is_due THEN
        v_moved := {schema}.promote(p_due_by, 2000);
        IF v_moved = 2000 THEN
            -- A claim could now take a task ahead of one of higher priority that is not moved yet.
            is_partial := true;
            RETURN;
        END IF;
        IF v_moved > p_limit AND {schema}.is_awaited('work') THEN
            -- Other workers could not see these tasks while they were being moved.
            PERFORM {schema}.tell_of_work(0);
        END IF;
        -- The tasks that were moved may be of any kind.
        v_has_gated_or_suspect := true;
        v_has_parked := true;
    END IF;
    ready := {schema}.queues_in(0::smallint, p_queues);
    IF NOT (v_has_gated_or_suspect OR v_has_parked) THEN
        RETURN;
    END IF;
    v_takes_suspect := NOT EXISTS (
        SELECT FROM {schema}.live WHERE place = 4 AND crashes > 0 AND owner = p_owner
    );
    IF v_has_gated_or_suspect THEN
        gated := {schema}.queues_in(5::smallint, p_queues);
    END IF;
    IF v_has_gated_or_suspect AND v_takes_suspect THEN
        suspects := {schema}.queues_in(1::smallint, p_queues);
    END IF;
    IF v_has_parked THEN
        lots := {schema}.awake_lots(p_queues, p_now, v_takes_suspect);
    END IF;
END $$;

-- Lock the first ordinary tasks of these queues that no other transaction has locked, in claim order.
-- returns  picked: their row addresses, which are valid while the rows are locked;
--          is_odd: at least one of them is expired or not due yet, so the claim needs the rules
CREATE OR REPLACE FUNCTION {schema}.pick(
    p_queues text[], p_limit int, p_due_by bigint, OUT picked tid[], OUT is_odd boolean
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_page text[];
    v_more tid[];
    v_page_is_odd boolean;
    v_rank bigint := -9223372036854775808;
    v_due bigint := -9223372036854775808;
    v_seq bigint := -1;
BEGIN
    IF cardinality(p_queues) = 1 THEN
        SELECT coalesce(array_agg(first.ctid), '{}'), coalesce(bool_or(first.is_odd), false)
        INTO picked, is_odd
        FROM (
            SELECT ctid, visible > p_due_by OR coalesce(expires <= p_due_by, false) AS is_odd
            FROM {schema}.live
            WHERE place = 0 AND place IN (0, 1, 5) AND queue = p_queues[1]
            ORDER BY rank, due, seq LIMIT p_limit FOR UPDATE SKIP LOCKED
        ) AS first;
        RETURN;
    END IF;
    picked := '{}';
    is_odd := false;
    -- Read in the order of all queues together, and locked only then: locking the first tasks of each
    -- queue would hide tasks from other workers that this claim does not take in the end.
    WHILE cardinality(picked) < p_limit LOOP
        SELECT
            array_agg(id), (array_agg(rank))[count(*)::int], (array_agg(due))[count(*)::int],
            (array_agg(seq))[count(*)::int]
        INTO v_page, v_rank, v_due, v_seq
        FROM (
            SELECT first.* FROM unnest(p_queues) AS requested (name), LATERAL (
                SELECT id, rank, due, seq FROM {schema}.live
                WHERE place = 0 AND place IN (0, 1, 5) AND queue = name
                    AND (rank, due, seq) > (v_rank, v_due, v_seq)
                ORDER BY rank, due, seq LIMIT p_limit
            ) AS first
            ORDER BY rank, due, seq LIMIT p_limit
        ) AS page;
        EXIT WHEN v_page IS NULL;
        SELECT coalesce(array_agg(first.ctid), '{}'), coalesce(bool_or(first.is_odd), false)
        INTO v_more, v_page_is_odd
        FROM (
            SELECT ctid, visible > p_due_by OR coalesce(expires <= p_due_by, false) AS is_odd
            FROM {schema}.live
            WHERE id = ANY (v_page) AND place = 0
            ORDER BY rank, due, seq LIMIT p_limit - cardinality(picked) FOR UPDATE SKIP LOCKED
        ) AS first;
        picked := picked || v_more;
        is_odd := is_odd OR v_page_is_odd;
        EXIT WHEN cardinality(v_page) < p_limit;
    END LOOP;
END $$;
