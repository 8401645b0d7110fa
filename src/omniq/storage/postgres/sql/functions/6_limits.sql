-- Running limits: the rules of gate_rules.py and gate_states.py, for claims and outcomes that need no others. A test
-- plays random games on two stores and compares this with the rules.
-- {schema}  the store's schema
--
-- The state of a limit is a document, encoded as msgpack, in which `holders` is the last field. A holder is the id of a
-- task and the token of its claim.

-- Text as msgpack.
CREATE OR REPLACE FUNCTION {schema}.packed(p_value text) RETURNS bytea
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN pg_catalog.octet_length(p_value) OPERATOR(pg_catalog.<) 32
            THEN pg_catalog.set_byte('\x00'::bytea, 0, 160 OPERATOR(pg_catalog.+) pg_catalog.octet_length(p_value))
        WHEN pg_catalog.octet_length(p_value) OPERATOR(pg_catalog.<) 256
            THEN pg_catalog.set_byte('\xd900'::bytea, 1, pg_catalog.octet_length(p_value))
        ELSE '\xda'::bytea OPERATOR(pg_catalog.||)
            pg_catalog.substring(pg_catalog.int4send(pg_catalog.octet_length(p_value)), 3)
    END OPERATOR(pg_catalog.||) pg_catalog.convert_to(p_value, 'UTF8')
$$;

-- A number that is not negative as msgpack.
CREATE OR REPLACE FUNCTION {schema}.packed(p_value bigint) RETURNS bytea
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN p_value OPERATOR(pg_catalog.<) 128 THEN pg_catalog.substring(pg_catalog.int8send(p_value), 8)
        WHEN p_value OPERATOR(pg_catalog.<) 256
            THEN '\xcc'::bytea OPERATOR(pg_catalog.||) pg_catalog.substring(pg_catalog.int8send(p_value), 8)
        WHEN p_value OPERATOR(pg_catalog.<) 65536
            THEN '\xcd'::bytea OPERATOR(pg_catalog.||) pg_catalog.substring(pg_catalog.int8send(p_value), 7)
        WHEN p_value OPERATOR(pg_catalog.<) 4294967296
            THEN '\xce'::bytea OPERATOR(pg_catalog.||) pg_catalog.substring(pg_catalog.int8send(p_value), 5)
        ELSE '\xcf'::bytea OPERATOR(pg_catalog.||) pg_catalog.int8send(p_value)
    END
$$;

-- The number of bytes of a packed number that begins with this byte; NULL if it is none, or negative.
CREATE OR REPLACE FUNCTION {schema}.size_of_number(p_tag int) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN p_tag OPERATOR(pg_catalog.<) 128 THEN 1
        WHEN p_tag OPERATOR(pg_catalog.>=) 204 AND p_tag OPERATOR(pg_catalog.<=) 207
            THEN 1 OPERATOR(pg_catalog.+) (1 OPERATOR(pg_catalog.<<) (p_tag OPERATOR(pg_catalog.-) 204))
    END
$$;

-- Where the holder ends that begins at a position; NULL if none does. Bytes must follow the holders.
CREATE OR REPLACE FUNCTION {schema}.end_of_holder(p_data bytea, p_at int) RETURNS int
LANGUAGE plpgsql IMMUTABLE {pinned} AS $$
DECLARE
    v_tag int := get_byte(p_data, p_at);
    v_at int;
BEGIN
    v_at := p_at + 1 + CASE
        WHEN v_tag BETWEEN 160 AND 191 THEN v_tag - 159
        WHEN v_tag = 217 THEN 2 + get_byte(p_data, p_at + 1)
        WHEN v_tag = 218 THEN 3 + 256 * get_byte(p_data, p_at + 1) + get_byte(p_data, p_at + 2)
    END;
    IF v_at >= octet_length(p_data) THEN
        RETURN NULL;
    END IF;
    RETURN v_at + {schema}.size_of_number(get_byte(p_data, v_at - 1));
END $$;

-- The state of a running limit.
-- returns  wake: `wake_at` as it is packed, '' for 0; count: the number of holders, NULL if the state is damaged
CREATE OR REPLACE FUNCTION {schema}.unpack_limit(
    p_data bytea, OUT wake bytea, OUT has_parked boolean, OUT parks bigint, OUT count int, OUT items bytea
)
LANGUAGE plpgsql IMMUTABLE {pinned} AS $$
DECLARE
    v_size int := octet_length(p_data);
    v_data bytea := p_data || '\x00000000000000000000'::bytea;
    v_fields int := get_byte(v_data, 0) - 128;
    v_at int := 2;
    v_end int;
    v_tag int;
    v_name bytea;
BEGIN
    wake := '';
    has_parked := false;
    parks := 0;
    items := '';
    count := CASE WHEN v_fields BETWEEN 0 AND 4 THEN 0 END;
    FOR v_number IN 1..v_fields LOOP
        v_tag := get_byte(v_data, v_at - 1);
        v_name := substring(v_data, v_at, v_tag - 159);
        v_at := v_at + v_tag - 159;
        IF count IS NULL OR v_tag NOT BETWEEN 160 AND 191 OR v_at > v_size THEN
            count := NULL;
            RETURN;
        END IF;
        v_tag := get_byte(v_data, v_at - 1);
        CASE v_name
            WHEN '\xa777616b655f6174'::bytea THEN -- wake_at
                v_end := v_at + {schema}.size_of_number(v_tag);
                wake := substring(v_data, v_at, v_end - v_at);
            WHEN '\xaa6861735f7061726b6564'::bytea THEN -- has_parked
                v_end := v_at + 1;
                has_parked := v_tag = 195;
            WHEN '\xa57061726b73'::bytea THEN -- parks
                v_end := v_at + {schema}.size_of_number(v_tag);
                parks := CASE WHEN v_tag < 128 THEN v_tag ELSE 0 END;
                FOR v_byte IN v_at..v_end - 2 LOOP
                    parks := (parks << 8) + get_byte(v_data, v_byte);
                END LOOP;
            WHEN '\xa7686f6c64657273'::bytea THEN -- holders
                IF v_tag BETWEEN 144 AND 159 THEN
                    count := v_tag - 144;
                    v_end := v_at + 1;
                ELSIF v_tag = 220 THEN
                    count := 256 * get_byte(v_data, v_at) + get_byte(v_data, v_at + 1);
                    v_end := v_at + 3;
                ELSE
                    v_end := NULL;
                END IF;
                v_at := v_end;
                IF v_number = v_fields THEN
                    v_end := v_size + 1;
                ELSE
                    -- An older omniq has written it.
                    FOR v_holder IN 1..count LOOP
                        v_end := CASE WHEN v_end < v_size THEN {schema}.end_of_holder(v_data, v_end) END;
                    END LOOP;
                END IF;
                items := substring(v_data, v_at, v_end - v_at);
            ELSE
                v_end := NULL;
        END CASE;
        v_at := v_end;
        IF v_at IS NULL THEN
            count := NULL;
            RETURN;
        END IF;
    END LOOP;
END $$;

-- Remove a holder from the packed ones; returns them unchanged if it is not among them.
CREATE OR REPLACE FUNCTION {schema}.without_holder(p_items bytea, p_holder bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE {pinned} AS $$
DECLARE
    v_found int := position(p_holder IN p_items);
    v_data bytea;
    v_at int := 1;
BEGIN
    IF v_found = 1 THEN
        RETURN substring(p_items, octet_length(p_holder) + 1);
    END IF;
    -- The same bytes may be in the id of another holder.
    v_data := p_items || '\x00000000000000000000'::bytea;
    WHILE v_found > 0 AND v_at < v_found LOOP
        v_at := {schema}.end_of_holder(v_data, v_at);
        IF v_at > v_found THEN
            v_found := position(p_holder IN substring(p_items, v_at));
            v_found := CASE WHEN v_found > 0 THEN v_found + v_at - 1 ELSE 0 END;
        END IF;
    END LOOP;
    IF v_found = 0 OR v_at IS NULL THEN
        RETURN p_items;
    END IF;
    RETURN substring(p_items, 1, v_found - 1) || substring(p_items, v_found + octet_length(p_holder));
END $$;

-- Lock the documents of limits; returns those that could be locked, the missing ones created.
-- p_waits    wait for other transactions. Safe from deadlocks as long as the caller has locked no limit: each
--            transaction locks its first ones in the order of their keys, and does not wait for later ones
-- p_creates  create missing ones
CREATE OR REPLACE FUNCTION {schema}.lock_limits(p_keys text[], p_waits boolean, p_creates boolean)
RETURNS TABLE (key text, due bigint, data bytea)
LANGUAGE plpgsql VOLATILE {pinned} AS $$
#variable_conflict use_column
DECLARE
    v_missing text[];
BEGIN
    IF p_creates THEN
        v_missing := array(
            SELECT name FROM unnest(p_keys) AS given (name)
            WHERE NOT EXISTS (SELECT FROM {schema}.documents WHERE kind = 'gate' AND key = name)
                -- Else another transaction creates it, and this one would wait for it.
                AND pg_try_advisory_xact_lock({schema}.lock_key('limit ' || name))
            ORDER BY name
        );
        IF cardinality(v_missing) > 0 THEN
            INSERT INTO {schema}.documents (kind, key, data)
            SELECT 'gate', name, '\x80' FROM unnest(v_missing) AS given (name)
            ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    IF p_waits THEN
        RETURN QUERY
        SELECT key, due, data FROM {schema}.documents WHERE kind = 'gate' AND key = ANY (p_keys)
        ORDER BY key FOR UPDATE;
    ELSE
        RETURN QUERY
        SELECT key, due, data FROM {schema}.documents WHERE kind = 'gate' AND key = ANY (p_keys)
        ORDER BY key FOR UPDATE SKIP LOCKED;
    END IF;
END $$;

-- Take claims out of their limits, offer the room to parked tasks, and let due tasks enter the limits or park them.
-- The caller claims the tasks that have entered.
-- p_claim    what to claim; NULL: nothing
-- p_left     the claims that leave, all of which are recorded
-- returns    picked: the row addresses of the tasks to claim, in claim order;
--            rest: 0 there are no others, or enough; 1 call again for the others; 2 the others need the rules
CREATE OR REPLACE FUNCTION {schema}.pass_limits(
    p_now bigint, p_claim {schema}.claim, p_due_by bigint, p_first_token bigint, p_left {schema}.leaving,
    p_paused text[], OUT picked tid[], OUT rest int
)
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    c_forever CONSTANT bytea := '\xcf4000000000000000';
    c_most_offered CONSTANT int := 100;
    c_most_moves CONSTANT int := 1000;
    c_largest_page CONSTANT int := 500;
    -- The limits that are locked, by their number.
    v_keys text[];
    v_dues bigint[];
    v_wakes bytea[];
    v_has_parked boolean[];
    v_parks bigint[];
    v_counts int[];
    v_items bytea[];
    v_sizes bigint[];
    v_is_changed boolean[];
    v_offers int[];
    v_parks_now boolean[];
    -- A page of tasks: their row addresses, limits, what they are as holders, and whether they need the rules.
    v_rows tid[];
    v_limits text[];
    v_limit_sizes bigint[];
    v_holders bytea[];
    v_is_odd boolean[];
    v_ids text[];
    v_rank bigint := -9223372036854775808;
    v_turn bigint := -9223372036854775808;
    v_seq bigint := -1;
    v_size int := 0;
    v_is_last boolean;
    v_lanes record;
    v_new record;
    v_locked tid[];
    v_found int;
    v_at int;
    v_last text := '';
    v_parked tid[] := '{}';
    v_parked_under text[] := '{}';
    v_left_offers int := 0;
BEGIN
    picked := '{}';
    rest := 0;
    -- Leave. A state that is damaged counts as empty.
    SELECT coalesce(array_agg(locked.key), '{}'), array_agg(locked.due), array_agg(state.wake),
        array_agg(state.has_parked), array_agg(state.parks), array_agg(coalesce(state.count, 0)),
        array_agg(CASE WHEN state.count IS NULL THEN '' ELSE state.items END)
    INTO v_keys, v_dues, v_wakes, v_has_parked, v_parks, v_counts, v_items
    FROM {schema}.lock_limits(p_left.keys, true, false) AS locked, {schema}.unpack_limit(locked.data) AS state;
    v_sizes := array_fill(NULL::bigint, array[cardinality(v_keys)]);
    v_is_changed := array_fill(false, array[cardinality(v_keys)]);
    FOR v_number IN 1..coalesce(cardinality(p_left.ids), 0) LOOP
        IF v_last <> p_left.keys[v_number] THEN
            v_last := p_left.keys[v_number];
            v_at := array_position(v_keys, v_last);
        END IF;
        CONTINUE WHEN v_at IS NULL;
        v_found := octet_length(v_items[v_at]);
        v_items[v_at] := {schema}.without_holder(
            v_items[v_at],
            '\x92'::bytea || {schema}.packed(p_left.ids[v_number])
                || {schema}.packed(coalesce(p_left.tokens[v_number], p_left.tokens[1]))
        );
        IF octet_length(v_items[v_at]) < v_found THEN
            v_counts[v_at] := v_counts[v_at] - 1;
        END IF;
        v_sizes[v_at] := coalesce(p_left.sizes[v_number], p_left.sizes[1]);
        v_wakes[v_at] := '';
        v_dues[v_at] := 0;
        v_is_changed[v_at] := true;
    END LOOP;
    -- Offer the room of each limit to its first parked tasks, of each lot.
    IF true = ANY (v_has_parked) THEN
        SELECT coalesce(array_agg(first.ctid), '{}'), array_agg(lot.gate), array_agg(first.number = asked.room)
        INTO v_rows, v_limits, v_is_odd
        FROM {schema}.lots(array(
            SELECT key FROM unnest(v_keys, v_sizes, v_counts, v_has_parked) AS known (key, size, count, has_parked)
            WHERE has_parked AND size > count
        )) AS lot, LATERAL (
            SELECT least(v_sizes[known.at] - v_counts[known.at], c_most_offered) AS room
            FROM (SELECT array_position(v_keys, lot.gate)) AS known (at)
        ) AS asked, LATERAL (
            SELECT ctid, row_number() OVER (ORDER BY rank, turn, seq) AS number FROM {schema}.live
            WHERE place = 3 AND parked = lot.gate AND live.queue = lot.queue AND live.func_path = lot.func_path
                AND (crashes > 0) = lot.is_suspect
            ORDER BY rank, turn, seq LIMIT asked.room
        ) AS first;
        v_locked := array(SELECT ctid FROM {schema}.live WHERE ctid = ANY (v_rows) FOR UPDATE SKIP LOCKED);
        UPDATE {schema}.live
        SET parked = NULL, place = {schema}.place_of(NULL, visible, p_now, NULL, crashes)
        WHERE ctid = ANY (v_locked);
        v_left_offers := cardinality(v_locked);
        FOR v_number IN 1..cardinality(v_keys) LOOP
            v_has_parked[v_number] := v_has_parked[v_number] AND v_counts[v_number] >= v_sizes[v_number];
            IF v_has_parked[v_number] THEN
                v_wakes[v_number] := c_forever;
                v_dues[v_number] := NULL;
            END IF;
        END LOOP;
        FOR v_number IN 1..cardinality(v_rows) LOOP
            v_at := array_position(v_keys, v_limits[v_number]);
            v_offers[v_at] := coalesce(v_offers[v_at], 0) + 1;
            v_has_parked[v_at] := v_has_parked[v_at] OR v_is_odd[v_number];
            IF v_dues[v_at] = 0 THEN
                -- What was offered will enter, and then the limit has no room, or refill the limit.
                v_wakes[v_at] := c_forever;
                v_dues[v_at] := NULL;
            END IF;
            IF v_is_odd[v_number] AND v_sizes[v_at] - v_counts[v_at] > c_most_offered
                OR cardinality(v_locked) < cardinality(v_rows)
            THEN
                -- There is room for more, or another transaction changes one of them: the next claim asks again.
                v_has_parked[v_at] := true;
                v_wakes[v_at] := {schema}.packed(p_now);
                v_dues[v_at] := p_now;
            END IF;
        END LOOP;
    END IF;
    -- Enter, or park.
    v_is_last := p_claim.size IS NULL;
    IF NOT v_is_last THEN
        v_lanes := {schema}.lanes(0::smallint, p_claim.wanted, p_paused);
        v_is_last := cardinality(v_lanes.functions) = 0;
    END IF;
    WHILE NOT v_is_last AND rest = 0 AND cardinality(picked) < p_claim.size LOOP
        -- Growing pages, because a page may consist of tasks that one limit blocks.
        v_size := least(greatest(p_claim.size - cardinality(picked), 2 * v_size), c_largest_page);
        IF cardinality(v_lanes.functions) = 1 THEN
            SELECT array_agg(id), array_agg(first.ctid), array_agg(first.gates[1]),
                array_agg(CASE WHEN first.gates[2] ~ '^=[0-9]{1,18}$' THEN substr(first.gates[2], 2)::bigint END),
                array_agg('\x92'::bytea || {schema}.packed(id) || {schema}.packed(greatest(token + 1, p_first_token))),
                array_agg(
                    cardinality(first.gates) <> 2 OR cancel_requested OR coalesce(expires <= p_due_by, false)
                ),
                (array_agg(rank))[count(*)::int], (array_agg(turn))[count(*)::int], (array_agg(seq))[count(*)::int]
            INTO v_ids, v_rows, v_limits, v_limit_sizes, v_holders, v_is_odd, v_rank, v_turn, v_seq
            FROM (
                SELECT ctid, * FROM {schema}.live
                WHERE place = 0 AND func_path = v_lanes.functions[1] AND queue = v_lanes.queues[1]
                    AND visible <= p_due_by AND (rank, turn, seq) > (v_rank, v_turn, v_seq)
                ORDER BY rank, turn, seq LIMIT v_size FOR UPDATE SKIP LOCKED
            ) AS first;
            v_is_last := coalesce(cardinality(v_ids), 0) < v_size;
        ELSE
            SELECT array_agg(id), (array_agg(rank))[count(*)::int], (array_agg(turn))[count(*)::int],
                (array_agg(seq))[count(*)::int]
            INTO v_ids, v_rank, v_turn, v_seq
            FROM {schema}.first_of(
                0::smallint, v_lanes.queues, v_lanes.functions, p_due_by, v_rank, v_turn, v_seq, v_size
            );
            v_is_last := coalesce(cardinality(v_ids), 0) < v_size;
            SELECT array_agg(first.ctid), array_agg(first.gates[1]),
                array_agg(CASE WHEN first.gates[2] ~ '^=[0-9]{1,18}$' THEN substr(first.gates[2], 2)::bigint END),
                array_agg('\x92'::bytea || {schema}.packed(id) || {schema}.packed(greatest(token + 1, p_first_token))),
                array_agg(
                    cardinality(first.gates) <> 2 OR cancel_requested OR coalesce(expires <= p_due_by, false)
                )
            INTO v_rows, v_limits, v_limit_sizes, v_holders, v_is_odd
            FROM (
                -- `+ 0`: the planner must not use the index of all ready tasks.
                SELECT ctid, * FROM {schema}.live WHERE id = ANY (v_ids) AND place + 0 = 0
                ORDER BY rank, turn, seq FOR UPDATE SKIP LOCKED
            ) AS first;
        END IF;
        v_ids := array(
            SELECT DISTINCT name FROM unnest(v_limits) AS given (name)
            WHERE name IS NOT NULL AND array_position(v_keys, name) IS NULL
        );
        IF cardinality(v_ids) > 0 THEN
            SELECT array_agg(locked.key) AS keys, array_agg(locked.due) AS dues, array_agg(state.wake) AS wakes,
                array_agg(state.has_parked) AS has_parked, array_agg(state.parks) AS parks,
                array_agg(state.count) AS counts, array_agg(state.items) AS items
            INTO v_new
            FROM {schema}.lock_limits(v_ids, cardinality(v_keys) = 0, true) AS locked,
                {schema}.unpack_limit(locked.data) AS state;
            v_keys := v_keys || v_new.keys;
            v_dues := v_dues || v_new.dues;
            v_wakes := v_wakes || v_new.wakes;
            v_has_parked := v_has_parked || v_new.has_parked;
            v_parks := v_parks || v_new.parks;
            v_counts := v_counts || v_new.counts;
            v_items := v_items || v_new.items;
            v_is_changed := v_is_changed || array_fill(false, array[coalesce(cardinality(v_new.keys), 0)]);
        END IF;
        v_last := '';
        FOR v_number IN 1..coalesce(cardinality(v_rows), 0) LOOP
            EXIT WHEN cardinality(picked) = p_claim.size;
            IF v_limits[v_number] IS NULL AND v_is_odd[v_number] IS NOT TRUE THEN
                picked := picked || v_rows[v_number];
                CONTINUE;
            END IF;
            IF v_last <> v_limits[v_number] THEN
                v_last := v_limits[v_number];
                v_at := array_position(v_keys, v_last);
            END IF;
            IF v_is_odd[v_number] IS NOT FALSE OR v_limit_sizes[v_number] IS NULL OR v_at IS NULL
                OR v_counts[v_at] IS NULL OR p_claim.due_by IS NOT NULL
            THEN
                rest := 2;
                EXIT;
            END IF;
            v_is_changed[v_at] := true;
            IF v_counts[v_at] >= v_limit_sizes[v_number] THEN
                v_parked := v_parked || v_rows[v_number];
                v_parked_under := v_parked_under || v_last;
                IF v_parks_now[v_at] IS NULL THEN
                    -- Always a change of the state: a section that has read it does not know of this task.
                    v_parks_now[v_at] := true;
                    v_parks[v_at] := v_parks[v_at] + 1;
                    v_has_parked[v_at] := true;
                    v_wakes[v_at] := c_forever;
                    v_dues[v_at] := NULL;
                END IF;
                CONTINUE;
            END IF;
            picked := picked || v_rows[v_number];
            v_items[v_at] := v_items[v_at] || v_holders[v_number];
            v_counts[v_at] := v_counts[v_at] + 1;
            IF v_offers[v_at] > 0 THEN
                v_offers[v_at] := v_offers[v_at] - 1;
                v_left_offers := v_left_offers - 1;
            END IF;
            IF v_has_parked[v_at] AND v_counts[v_at] >= v_limit_sizes[v_number] THEN
                v_wakes[v_at] := c_forever;
                v_dues[v_at] := NULL;
            END IF;
        END LOOP;
        IF rest = 0 AND NOT v_is_last AND cardinality(picked) < p_claim.size
            AND cardinality(picked) + cardinality(v_parked) >= c_most_moves
        THEN
            rest := 1;
        END IF;
    END LOOP;
    -- Write.
    IF cardinality(v_parked) > 0 THEN
        UPDATE {schema}.live SET place = 3, parked = given.parked
        FROM unnest(v_parked, v_parked_under) AS given (address, parked) WHERE live.ctid = given.address;
    END IF;
    UPDATE {schema}.documents
    SET due = CASE WHEN given.has_parked THEN given.due END,
        data = set_byte(
            '\x80'::bytea, 0,
            128 + (given.wake <> '')::int + given.has_parked::int + (given.parks > 0)::int + (given.count > 0)::int
        )
            || CASE WHEN given.wake <> '' THEN '\xa777616b655f6174'::bytea || given.wake ELSE '' END
            || CASE WHEN given.has_parked THEN '\xaa6861735f7061726b6564c3'::bytea ELSE '' END
            || CASE WHEN given.parks > 0 THEN '\xa57061726b73'::bytea || {schema}.packed(given.parks) ELSE '' END
            || CASE
                WHEN given.count = 0 THEN ''
                WHEN given.count < 16
                    THEN set_byte('\xa7686f6c6465727300'::bytea, 8, 144 + given.count) || given.items
                ELSE '\xa7686f6c64657273dc'::bytea || substring(int4send(given.count), 3) || given.items
            END
    FROM unnest(v_keys, v_dues, v_wakes, v_has_parked, v_parks, v_counts, v_items, v_is_changed)
        AS given (key, due, wake, has_parked, parks, count, items, is_changed)
    WHERE kind = 'gate' AND documents.key = ANY (array[given.key])
        AND given.is_changed AND (given.count > 0 OR given.has_parked);
    DELETE FROM {schema}.documents
    USING unnest(v_keys, v_has_parked, v_counts) AS given (key, has_parked, count)
    WHERE kind = 'gate' AND documents.key = ANY (array[given.key]) AND given.count = 0 AND NOT given.has_parked;
    IF v_left_offers > 0 AND {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(0);
    END IF;
END $$;
