-- Claim: where a claim finds ready tasks, and the first of them.
-- {schema}  the store's schema
--
-- A lane is the ready tasks of one function, or of one function in one queue. Which functions a claim wants is
-- given as ranges of names (p_lows, p_highs) and names to leave out (p_excluded).

-- The queues to search: the given ones (NULL: all) without the paused ones. NULL: all, and none is paused.
CREATE OR REPLACE FUNCTION {schema}.unpaused(p_queues text[], p_paused text[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queues text[] := p_queues;
BEGIN
    IF cardinality(p_paused) = 0 THEN
        RETURN p_queues;
    END IF;
    IF p_queues IS NULL THEN
        -- Skip from one name to the next in the index: one lookup for each queue, not for each task.
        v_queues := array(
            WITH RECURSIVE names (place, name) AS (
                SELECT place, (
                    SELECT queue FROM {schema}.live WHERE live.place = kinds.place AND live.place < 2
                    ORDER BY queue DESC LIMIT 1
                )
                FROM (VALUES (0::smallint), (1::smallint)) AS kinds (place)
                UNION ALL
                SELECT place, (
                    SELECT queue FROM {schema}.live
                    WHERE live.place = names.place AND live.place < 2 AND queue < name
                    ORDER BY queue DESC LIMIT 1
                )
                FROM names WHERE name IS NOT NULL
            )
            SELECT DISTINCT name FROM names WHERE name IS NOT NULL
        );
    END IF;
    RETURN array(SELECT name FROM unnest(v_queues) AS given (name) WHERE name <> ALL (p_paused));
END $$;

-- The lanes with ready tasks of that place: two arrays of the same length. `queues` is NULL if p_queues is.
CREATE OR REPLACE FUNCTION {schema}.lanes(
    p_place smallint, p_queues text[], p_lows text[], p_highs text[], p_excluded text[],
    OUT queues text[], OUT functions text[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_name text;
    v_is_only boolean;
BEGIN
    -- All names are read from the far end of the index, where claims leave no dead entries.
    IF p_queues IS NULL AND cardinality(p_lows) = 1 THEN
        -- The last name, and whether there is another one: often there is none.
        SELECT last.func_path, NOT EXISTS (
            SELECT FROM {schema}.live
            WHERE place = p_place AND place < 2 AND func_path >= p_lows[1] AND func_path < last.func_path
        )
        INTO v_name, v_is_only
        FROM (
            SELECT func_path FROM {schema}.live
            WHERE place = p_place AND place < 2 AND func_path >= p_lows[1] AND func_path < p_highs[1]
            ORDER BY func_path DESC LIMIT 1
        ) AS last;
        IF v_name IS NULL OR v_is_only THEN
            functions := CASE WHEN v_name IS NULL OR v_name = ANY (p_excluded)
                THEN '{}' ELSE array[v_name] END;
            RETURN;
        END IF;
    END IF;
    IF p_queues IS NULL THEN
        functions := array(
            WITH RECURSIVE found (low, name) AS (
                SELECT low, (
                    SELECT func_path FROM {schema}.live
                    WHERE place = p_place AND place < 2 AND func_path >= low AND func_path < high
                    ORDER BY func_path DESC LIMIT 1
                )
                FROM unnest(p_lows, p_highs) AS ranges (low, high)
                UNION ALL
                SELECT low, (
                    SELECT func_path FROM {schema}.live
                    WHERE place = p_place AND place < 2 AND func_path >= low AND func_path < name
                    ORDER BY func_path DESC LIMIT 1
                )
                FROM found WHERE name IS NOT NULL
            )
            SELECT name FROM found WHERE name IS NOT NULL AND name <> ALL (p_excluded)
        );
        RETURN;
    END IF;
    WITH RECURSIVE found (lane, low, name) AS (
        SELECT requested, low, (
            SELECT func_path FROM {schema}.live
            WHERE place = p_place AND place < 2 AND queue = requested
                AND func_path >= low AND func_path < high
            ORDER BY func_path DESC LIMIT 1
        )
        FROM unnest(p_queues) AS given (requested), unnest(p_lows, p_highs) AS ranges (low, high)
        UNION ALL
        SELECT lane, low, (
            SELECT func_path FROM {schema}.live
            WHERE place = p_place AND place < 2 AND queue = lane AND func_path >= low AND func_path < name
            ORDER BY func_path DESC LIMIT 1
        )
        FROM found WHERE name IS NOT NULL
    )
    SELECT coalesce(array_agg(lane), '{}'), coalesce(array_agg(name), '{}') INTO queues, functions
    FROM found WHERE name IS NOT NULL AND name <> ALL (p_excluded);
END $$;

-- The first tasks of these lanes behind a position, in claim order.
CREATE OR REPLACE FUNCTION {schema}.first_of(
    p_place smallint, p_queues text[], p_functions text[], p_due_by bigint, p_rank bigint,
    p_turn bigint, p_seq bigint, p_limit int
) RETURNS TABLE (id text, rank bigint, turn bigint, seq bigint)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    IF p_queues IS NULL THEN
        RETURN QUERY
        SELECT first.* FROM unnest(p_functions) AS given (lane), LATERAL (
            SELECT id, rank, turn, seq FROM {schema}.live
            WHERE place = p_place AND place < 2 AND func_path = lane AND visible <= p_due_by
                AND (rank, turn, seq) > (p_rank, p_turn, p_seq)
            ORDER BY rank, turn, seq LIMIT p_limit
        ) AS first
        ORDER BY rank, turn, seq LIMIT p_limit;
    ELSE
        RETURN QUERY
        SELECT first.* FROM unnest(p_queues, p_functions) AS given (lane_queue, lane), LATERAL (
            SELECT id, rank, turn, seq FROM {schema}.live
            WHERE place = p_place AND place < 2 AND queue = lane_queue AND func_path = lane
                AND visible <= p_due_by AND (rank, turn, seq) > (p_rank, p_turn, p_seq)
            ORDER BY rank, turn, seq LIMIT p_limit
        ) AS first
        ORDER BY rank, turn, seq LIMIT p_limit;
    END IF;
END $$;

-- Move tasks that are due to the place where claims search, the earliest first; returns their number.
CREATE OR REPLACE FUNCTION {schema}.promote(p_due_by bigint, p_limit int) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    WITH moved AS (
        UPDATE {schema}.live SET place = {schema}.place_of(NULL, 0, 0, parked, crashes)
        WHERE id = ANY (array(
            SELECT id FROM {schema}.live WHERE place = 2 AND visible <= p_due_by
            ORDER BY visible LIMIT p_limit FOR UPDATE SKIP LOCKED
        ))
        RETURNING 1
    )
    SELECT count(*) FROM moved
$$;

-- `promote` for a claim; returns whether more tasks are due than one transaction may move: call again.
-- Otherwise a claim could take a task ahead of one of higher priority that is not moved yet.
CREATE OR REPLACE FUNCTION {schema}.promote_for(p_due_by bigint, p_limit int) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_moved bigint;
BEGIN
    v_moved := {schema}.promote(p_due_by, 2000);
    IF v_moved > p_limit AND {schema}.is_awaited('work') THEN
        -- Other workers could not see these tasks while they were being moved.
        PERFORM {schema}.tell_of_work(0);
    END IF;
    RETURN v_moved = 2000;
END $$;

-- The next page of tasks that a claim by the rules may take, in claim order. First moves the tasks that
-- are due.
-- p_suspects  whether suspects are among them
-- returns     NULL as the only line if more are due than one transaction may move: call again
CREATE OR REPLACE FUNCTION {schema}.candidates(
    p_owner text, p_queues text[], p_paused text[], p_lows text[], p_highs text[],
    p_excluded text[], p_suspects boolean, p_due_by bigint, p_rank bigint, p_turn bigint,
    p_seq bigint, p_limit int
) RETURNS SETOF {schema}.task
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queues text[];
    v_ids text[] := '{}';
    v_place smallint;
    v_lanes record;
BEGIN
    IF {schema}.promote_for(p_due_by, p_limit) THEN
        RETURN NEXT NULL;
        RETURN;
    END IF;
    v_queues := {schema}.unpaused(p_queues, p_paused);
    FOREACH v_place IN ARRAY CASE WHEN p_suspects THEN '{0,1}' ELSE '{0}' END::smallint[] LOOP
        v_lanes := {schema}.lanes(v_place, v_queues, p_lows, p_highs, p_excluded);
        v_ids := v_ids || array(
            SELECT id FROM {schema}.first_of(
                v_place, v_lanes.queues, v_lanes.functions, p_due_by, p_rank, p_turn, p_seq, p_limit
            )
        );
    END LOOP;
    RETURN QUERY
    SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
        started_at, crashes, status, cancel_requested, attached, owner, parked, rest, body, gates, xmin
    -- `+ 0`: the planner must not use the index of all ready tasks.
    FROM {schema}.live WHERE id = ANY (v_ids) AND place + 0 < 2
    ORDER BY rank, turn, seq LIMIT p_limit;
END $$;

-- The first tasks that are parked under these gates: of each queue and function, suspects and others
-- apart, up to p_limit in claim order.
CREATE OR REPLACE FUNCTION {schema}.parked(p_keys text[], p_limit int) RETURNS SETOF {schema}.task
LANGUAGE sql VOLATILE AS $$
    WITH RECURSIVE lots (key, lot) AS (
        SELECT key, (
            SELECT (queue, func_path, crashes > 0) FROM {schema}.live WHERE place = 3 AND parked = key
            ORDER BY queue, func_path, crashes > 0 LIMIT 1
        )
        FROM unnest(p_keys) AS given (key)
        UNION ALL
        SELECT key, (
            SELECT (queue, func_path, crashes > 0) FROM {schema}.live
            WHERE place = 3 AND parked = key AND (queue, func_path, crashes > 0) > lot
            ORDER BY queue, func_path, crashes > 0 LIMIT 1
        )
        FROM lots WHERE lot IS NOT NULL
    )
    SELECT first.*
    FROM lots, LATERAL (
        SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
            started_at, crashes, status, cancel_requested, attached, owner, parked, rest, body, gates,
            xmin
        FROM {schema}.live
        WHERE place = 3 AND parked = key AND (queue, func_path, crashes > 0) = lot
        ORDER BY rank, turn, seq LIMIT p_limit
    ) AS first
    WHERE lot IS NOT NULL
$$;
