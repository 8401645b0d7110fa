-- Claim: where a claim finds ready tasks, and the first of them.
-- {schema}  the store's schema
--
-- A lane is the ready tasks of one function in one queue.

-- The lanes with ready tasks of that place, without those of paused queues: two arrays of the same length. If there
-- are many, a function has two lanes instead: that of the queue `default`, and one of all other queues together, whose
-- queue is NULL. So a claim costs no more because there are more queues. While a queue is paused there are only single
-- lanes, because its tasks must not be in the way of others.
CREATE OR REPLACE FUNCTION {schema}.lanes(
    p_place smallint, p_wanted {schema}.wanted_tasks, p_paused text[],
    OUT queues text[], OUT functions text[]
)
LANGUAGE plpgsql VOLATILE {pinned} AS $$
#variable_conflict use_column
DECLARE
    c_few CONSTANT int := 16;
    v_is_only boolean;
    v_count int;
    v_lows text[] COLLATE "C";
    v_highs text[] COLLATE "C";
BEGIN
    -- All names are read from the far end of the index, where claims leave no dead entries.
    IF cardinality(p_wanted.lows) = 1 THEN
        -- The last lane, and whether there is another one: often there is none.
        SELECT array[last.queue], array[last.func_path], NOT EXISTS (
            SELECT FROM {schema}.live
            WHERE place = p_place AND place < 2 AND func_path >= p_wanted.lows[1]
                AND (func_path, queue) < (last.func_path, last.queue)
        )
        INTO queues, functions, v_is_only
        FROM (
            SELECT func_path, queue FROM {schema}.live
            WHERE place = p_place AND place < 2 AND func_path >= p_wanted.lows[1] AND func_path < p_wanted.highs[1]
            ORDER BY func_path DESC, queue DESC LIMIT 1
        ) AS last;
        IF functions IS NULL OR v_is_only THEN
            IF functions IS NULL OR functions[1] = ANY (p_wanted.excluded) OR queues[1] = ANY (p_paused)
                OR queues[1] <> ALL (p_wanted.queues)
            THEN
                queues := '{}';
                functions := '{}';
            END IF;
            RETURN;
        END IF;
    END IF;
    -- A worker that names its functions may have sent them behind its modules.
    SELECT array_agg(low ORDER BY low COLLATE "C"), array_agg(high ORDER BY low COLLATE "C")
    INTO v_lows, v_highs FROM unnest(p_wanted.lows, p_wanted.highs) AS ranges (low, high);
    IF p_wanted.queues IS NULL THEN
        -- Skip from one lane to the next in the index, or over all that stand between two ranges: one lookup for each lane
        -- and gap, not for each task, nor for each function that the worker could run.
        WITH RECURSIVE found (func_path, queue, high) AS (
            SELECT v_highs[cardinality(v_highs)], '' COLLATE "C", '' COLLATE "C"
            UNION ALL
            SELECT CASE WHEN last.func_path < around.high THEN last.func_path ELSE around.high END,
                CASE WHEN last.func_path < around.high THEN last.queue ELSE '' END,
                around.high
            FROM found, LATERAL (
                SELECT live.func_path, live.queue FROM {schema}.live
                WHERE place = p_place AND place < 2 AND live.func_path >= v_lows[1]
                    AND (live.func_path, live.queue) < (found.func_path, found.queue)
                ORDER BY live.func_path DESC, live.queue DESC LIMIT 1
            ) AS last, LATERAL (
                SELECT v_highs[width_bucket(last.func_path, v_lows)] AS high
            ) AS around
        )
        SELECT
            coalesce(array_agg(queue) FILTER (WHERE is_wanted), '{}'),
            coalesce(array_agg(func_path) FILTER (WHERE is_wanted), '{}'), count(*)
        INTO queues, functions, v_count
        FROM (
            SELECT func_path, queue, func_path <> ALL (p_wanted.excluded) AND queue <> ALL (p_paused) AS is_wanted
            FROM found WHERE func_path < high LIMIT CASE WHEN cardinality(p_paused) = 0 THEN c_few + 1 END
        ) AS first;
        IF v_count <= c_few OR cardinality(p_paused) > 0 THEN
            RETURN;
        END IF;
    END IF;
    WITH RECURSIVE found (func_path, high) AS (
        SELECT v_highs[cardinality(v_highs)], '' COLLATE "C"
        UNION ALL
        SELECT least(last.func_path, around.high), around.high
        FROM found, LATERAL (
            SELECT live.func_path FROM {schema}.live
            WHERE place = p_place AND place < 2 AND live.func_path >= v_lows[1]
                AND live.func_path < found.func_path
            ORDER BY live.func_path DESC LIMIT 1
        ) AS last, LATERAL (
            SELECT v_highs[width_bucket(last.func_path, v_lows)] AS high
        ) AS around
    )
    SELECT coalesce(array_agg(given.queue), '{}'), coalesce(array_agg(found.func_path), '{}')
    INTO queues, functions
    FROM found, unnest(coalesce(p_wanted.queues, '{default,NULL}')) AS given (queue), LATERAL (
        -- Which of them have tasks is found out when they are read.
        SELECT WHERE p_wanted.queues IS NULL
        UNION ALL
        (
            SELECT FROM {schema}.live
            WHERE p_wanted.queues IS NOT NULL AND place = p_place AND place < 2
                AND live.func_path = found.func_path AND live.queue = given.queue AND given.queue <> ALL (p_paused)
            LIMIT 1
        )
    ) AS lane
    WHERE found.func_path < found.high AND found.func_path <> ALL (p_wanted.excluded);
END $$;

-- The first tasks of these lanes behind a position, in claim order. A lane without a queue is that of all but `default`.
CREATE OR REPLACE FUNCTION {schema}.first_of(
    p_place smallint, p_queues text[], p_functions text[], p_due_by bigint, p_rank bigint,
    p_turn bigint, p_seq bigint, p_limit int
) RETURNS TABLE (id text, rank bigint, turn bigint, seq bigint)
LANGUAGE plpgsql VOLATILE {pinned} AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT first.* FROM unnest(p_queues, p_functions) AS lane (queue, func_path), LATERAL (
        (
            SELECT id, rank, turn, seq FROM {schema}.live
            WHERE place = p_place AND place < 2 AND live.func_path = lane.func_path
                AND live.queue = lane.queue AND visible <= p_due_by
                AND (rank, turn, seq) > (p_rank, p_turn, p_seq)
            ORDER BY rank, turn, seq LIMIT p_limit
        )
        UNION ALL
        (
            SELECT id, rank, turn, seq FROM {schema}.live
            WHERE lane.queue IS NULL AND place = p_place AND place < 2 AND live.func_path = lane.func_path
                AND live.queue <> 'default' AND visible <= p_due_by
                AND (rank, turn, seq) > (p_rank, p_turn, p_seq)
            ORDER BY rank, turn, seq LIMIT p_limit
        )
    ) AS first
    ORDER BY rank, turn, seq LIMIT p_limit;
END $$;

-- Move tasks that are due to the place where claims search, the earliest first; returns their number.
CREATE OR REPLACE FUNCTION {schema}.promote(p_due_by bigint, p_limit int) RETURNS bigint
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    v_count bigint;
BEGIN
    UPDATE {schema}.live SET place = {schema}.place_of(NULL, 0, 0, parked, crashes)
    WHERE id = ANY (array(
        SELECT id FROM {schema}.live WHERE place = 2 AND visible <= p_due_by
        ORDER BY visible LIMIT p_limit FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- `promote` for a claim; returns whether more tasks are due than one transaction may move: call again.
-- Otherwise a claim could take a task ahead of one of higher priority that is not moved yet.
CREATE OR REPLACE FUNCTION {schema}.promote_for(p_due_by bigint, p_limit int) RETURNS boolean
LANGUAGE plpgsql VOLATILE {pinned} AS $$
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
    p_paused text[], p_wanted {schema}.wanted_tasks, p_suspects boolean, p_due_by bigint,
    p_rank bigint, p_turn bigint, p_seq bigint, p_limit int
) RETURNS SETOF {schema}.task
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_ids text[] := '{}';
    v_places smallint[] := '{0}';
    v_place smallint;
    v_lanes record;
BEGIN
    IF EXISTS (SELECT FROM {schema}.live WHERE place = 2 AND visible <= p_due_by)
        AND {schema}.promote_for(p_due_by, p_limit)
    THEN
        RETURN NEXT NULL;
        RETURN;
    END IF;
    IF p_suspects AND EXISTS (SELECT FROM {schema}.live WHERE place = 1) THEN
        v_places := '{0,1}';
    END IF;
    FOREACH v_place IN ARRAY v_places LOOP
        v_lanes := {schema}.lanes(v_place, p_wanted, p_paused);
        IF cardinality(v_lanes.functions) = 1 AND v_lanes.queues[1] IS NOT NULL AND v_places = '{0}' THEN
            RETURN QUERY
            SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token,
                settled, started_at, crashes, status, cancel_requested, attached, owner, parked,
                {schema}.fitting(rest), {schema}.fitting(body), gates, xmin
            FROM {schema}.live
            WHERE place = 0 AND func_path = v_lanes.functions[1] AND queue = v_lanes.queues[1]
                AND visible <= p_due_by AND (rank, turn, seq) > (p_rank, p_turn, p_seq)
            ORDER BY rank, turn, seq LIMIT p_limit;
            RETURN;
        END IF;
        v_ids := v_ids || array(
            SELECT id FROM {schema}.first_of(
                v_place, v_lanes.queues, v_lanes.functions, p_due_by, p_rank, p_turn, p_seq, p_limit
            )
        );
    END LOOP;
    RETURN QUERY
    SELECT id, seq, queue, func_path, rank, turn, due, visible, created_at, expires, token, settled,
        started_at, crashes, status, cancel_requested, attached, owner, parked,
        {schema}.fitting(rest), {schema}.fitting(body), gates, xmin
    -- `+ 0`: the planner must not use the index of all ready tasks.
    FROM {schema}.live WHERE id = ANY (v_ids) AND place + 0 < 2
    ORDER BY rank, turn, seq LIMIT p_limit;
END $$;

-- The lots of tasks that are parked under these gates: of each queue and function, suspects and others apart.
-- STABLE: the statement that calls this must find the rows at these addresses.
-- returns  the gate and what the tasks have in common, and the row address of the first one in claim order
CREATE OR REPLACE FUNCTION {schema}.lots(p_keys text[])
RETURNS TABLE (gate text, queue text, func_path text, is_suspect boolean, first tid)
LANGUAGE plpgsql STABLE {pinned} AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE found (gate, queue, func_path, is_suspect, first) AS (
        SELECT gate, first.* FROM unnest(p_keys) AS given (gate), LATERAL (
            SELECT queue, func_path, crashes > 0, ctid FROM {schema}.live WHERE place = 3 AND parked = gate
            ORDER BY queue, func_path, crashes > 0, rank, turn, seq LIMIT 1
        ) AS first
        UNION ALL
        -- Skip from one lot to the next in the index.
        SELECT gate, next.* FROM found, LATERAL (
            SELECT live.queue, live.func_path, live.crashes > 0, live.ctid FROM {schema}.live
            WHERE place = 3 AND parked = gate
                AND (live.queue, live.func_path, live.crashes > 0) > (found.queue, found.func_path, is_suspect)
            ORDER BY live.queue, live.func_path, live.crashes > 0, rank, turn, seq LIMIT 1
        ) AS next
    )
    SELECT * FROM found;
END $$;

-- The first task of each lot that is parked under these gates.
CREATE OR REPLACE FUNCTION {schema}.first_parked(p_keys text[]) RETURNS SETOF {schema}.task
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    RETURN QUERY
    SELECT id, seq, live.queue, live.func_path, rank, turn, due, visible, created_at, expires, token,
        settled, started_at, crashes, status, cancel_requested, attached, owner, parked,
        {schema}.fitting(rest), {schema}.fitting(body), gates, xmin
    FROM {schema}.lots(p_keys) AS lot, {schema}.live WHERE live.ctid = lot.first;
END $$;

-- The first tasks that are parked under these gates: up to p_limit of each lot, in claim order.
CREATE OR REPLACE FUNCTION {schema}.parked(p_keys text[], p_limit int) RETURNS SETOF {schema}.task
LANGUAGE plpgsql VOLATILE {settings} AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT first.*
    FROM {schema}.lots(p_keys) AS lot, LATERAL (
        SELECT id, seq, live.queue, live.func_path, rank, turn, due, visible, created_at, expires, token,
            settled, started_at, crashes, status, cancel_requested, attached, owner, parked,
            {schema}.fitting(rest), {schema}.fitting(body), gates, xmin
        FROM {schema}.live
        WHERE place = 3 AND parked = lot.gate AND live.queue = lot.queue AND live.func_path = lot.func_path
            AND (crashes > 0) = lot.is_suspect
        ORDER BY rank, turn, seq LIMIT p_limit
    ) AS first;
END $$;

-- When the next task is due after an instant, or the next gate under which tasks may be parked.
CREATE OR REPLACE FUNCTION {schema}.next_due(p_after bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    RETURN least(
        (SELECT min(visible) FROM {schema}.live WHERE place = 2 AND visible > p_after),
        (
            SELECT min(due) FROM {schema}.documents
            WHERE kind = 'gate' AND due > p_after AND EXISTS (SELECT FROM {schema}.live WHERE place = 3)
        )
    );
END $$;

-- What a claim by the rules asks for, in one call.
-- p_now    the time, NULL for the server's
-- p_gates  the number of gates to return whose time has come
-- p_keys   the gates of the tasks whose outcomes are recorded: returned in the first line, so that their states are
--          read as well. The first task of each of their lots may run next
-- returns  a line with the `seq` -2: the time in `turn`; in `due` the epoch of the owner's lease, NULL if it has
--          none; in `crashes` whether it holds a suspect; in `visible` when the next task may be due; in `token` the
--          size of the page of candidates. Then the gates whose time has come and the paused queues, as lines with
--          the `seq` -3 and -4; the first parked tasks; and as many `candidates` as are missing then, without
--          suspects if one is held
CREATE OR REPLACE FUNCTION {schema}.begin_claim(
    p_owner text, p_now bigint, p_claim {schema}.claim, p_gates int, p_keys text[]
) RETURNS SETOF {schema}.task
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_facts {schema}.task;
    v_paused text[];
    v_parked {schema}.task[] := array(SELECT first FROM {schema}.first_parked(p_keys) AS first);
BEGIN
    v_facts.seq := -2;
    v_facts.token := greatest(p_claim.size - cardinality(v_parked), 1);
    v_facts.gates := p_keys;
    v_facts.turn := {schema}.micros(p_now);
    SELECT
        (SELECT epoch FROM {schema}.leases WHERE owner = p_owner AND NOT fenced AND beat >= p_claim.beat),
        EXISTS (SELECT FROM {schema}.live WHERE crashes > 0 AND owner = p_owner)::int,
        array(SELECT key FROM {schema}.documents WHERE kind = 'paused_queue' ORDER BY key),
        {schema}.next_due(v_facts.turn)
    INTO v_facts.due, v_facts.crashes, v_paused, v_facts.visible;
    RETURN NEXT v_facts;
    RETURN QUERY
    SELECT key, CASE kind WHEN 'gate' THEN -3::bigint ELSE -4 END, NULL, NULL, NULL::bigint,
        NULL::bigint, due, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint,
        NULL::bigint, NULL::integer, NULL::smallint, NULL::boolean, NULL::boolean, NULL, NULL, data,
        NULL::bytea, NULL::text[], NULL::xid
    FROM (
        (
            SELECT kind, key, due, data FROM {schema}.documents
            WHERE kind = 'gate' AND due <= v_facts.turn ORDER BY due LIMIT p_gates
        )
        UNION ALL
        SELECT 'paused_queue', name, NULL, NULL FROM unnest(v_paused) AS paused (name)
    ) AS found;
    RETURN QUERY SELECT * FROM unnest(v_parked);
    RETURN QUERY
    SELECT * FROM {schema}.candidates(
        v_paused, p_claim.wanted, v_facts.crashes = 0, coalesce(p_claim.due_by, v_facts.turn),
        -9223372036854775808, -9223372036854775808, -1, v_facts.token::int
    );
END $$;
