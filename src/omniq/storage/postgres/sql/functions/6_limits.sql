-- Running limits: the rules of gate_rules.py and gate_states.py, for claims and outcomes that need no others. A test
-- plays random games on two stores and compares this with the rules.
-- {schema}  the store's schema
--
-- The state of a limit is a document, encoded as msgpack, in which `holders` is the last field. A holder is the id of a
-- task and the token of its claim.

-- Text as msgpack. STABLE, as `convert_to` is: else PostgreSQL could not expand it in the statements that use it.
CREATE OR REPLACE FUNCTION {schema}.packed(p_value text) RETURNS bytea
LANGUAGE sql STABLE AS $$
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

-- The states of running limits, in the given order.
-- returns  wake: `wake_at` as it is packed, '' for 0; count: the number of holders, NULL if the state is damaged;
--          more: what needs the rules (see `Special` in gate_rules) as it is packed, '' for nothing
CREATE OR REPLACE FUNCTION {schema}.unpack_limits(p_states bytea[])
RETURNS TABLE (wake bytea, has_parked boolean, parks bigint, count int, items bytea, more bytea)
LANGUAGE plpgsql IMMUTABLE {pinned} AS $$
DECLARE
    v_data bytea;
    v_size int;
    v_fields int;
    v_at int;
    v_end int;
    v_tag int;
    v_name bytea;
BEGIN
    FOREACH v_data IN ARRAY p_states LOOP
        v_size := octet_length(v_data);
        v_data := v_data || '\x00000000000000000000'::bytea;
        v_fields := get_byte(v_data, 0) - 128;
        v_at := 2;
        wake := '';
        has_parked := false;
        parks := 0;
        items := '';
        more := '';
        count := CASE WHEN v_fields BETWEEN 0 AND 5 THEN 0 END;
        FOR v_number IN 1..v_fields LOOP
            v_tag := get_byte(v_data, v_at - 1);
            EXIT WHEN v_tag NOT BETWEEN 160 AND 191;
            v_name := substring(v_data, v_at, v_tag - 159);
            v_at := v_at + v_tag - 159;
            EXIT WHEN v_at > v_size;
            v_tag := get_byte(v_data, v_at - 1);
            v_end := NULL;
            IF v_name = '\xa7686f6c64657273'::bytea THEN -- holders
                IF v_tag BETWEEN 144 AND 159 THEN
                    count := v_tag - 144;
                    v_end := v_at + 1;
                ELSIF v_tag = 220 THEN
                    count := 256 * get_byte(v_data, v_at) + get_byte(v_data, v_at + 1);
                    v_end := v_at + 3;
                END IF;
                v_at := v_end;
                IF v_number = v_fields AND v_end IS NOT NULL THEN
                    v_end := v_size + 1;
                ELSE
                    -- An older omniq has written it.
                    FOR v_holder IN 1..count LOOP
                        v_end := CASE WHEN v_end < v_size THEN {schema}.end_of_holder(v_data, v_end) END;
                    END LOOP;
                END IF;
                items := substring(v_data, v_at, v_end - v_at);
            ELSIF v_name = '\xa777616b655f6174'::bytea THEN -- wake_at
                v_end := v_at + {schema}.size_of_number(v_tag);
                wake := substring(v_data, v_at, v_end - v_at);
            ELSIF v_name = '\xaa6861735f7061726b6564'::bytea THEN -- has_parked
                v_end := v_at + 1;
                has_parked := v_tag = 195;
            ELSIF v_name = '\xa57061726b73'::bytea THEN -- parks
                v_end := v_at + {schema}.size_of_number(v_tag);
                parks := CASE WHEN v_tag < 128 THEN v_tag ELSE 0 END;
                FOR v_byte IN v_at..coalesce(v_end - 2, 0) LOOP
                    parks := (parks << 8) + get_byte(v_data, v_byte);
                END LOOP;
            ELSIF v_name = '\xa46d6f7265'::bytea THEN -- more
                v_end := v_at + CASE
                    WHEN v_tag = 196 THEN 2 + get_byte(v_data, v_at)
                    WHEN v_tag = 197 THEN 3 + 256 * get_byte(v_data, v_at) + get_byte(v_data, v_at + 1)
                END;
                more := coalesce(substring(v_data, v_at, v_end - v_at), '');
            END IF;
            v_at := v_end;
            EXIT WHEN v_at IS NULL;
        END LOOP;
        -- A holder has four bytes at least.
        IF v_at IS DISTINCT FROM v_size + 1 OR octet_length(items) < 4 * count THEN
            count := NULL;
            items := '';
        END IF;
        RETURN NEXT;
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
    -- The same bytes may be in the token of another holder.
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

-- Lock the documents of limits; returns those that could be locked, the missing ones created, with their row addresses.
-- p_keys     each key once
-- p_waits    wait for other transactions. Safe from deadlocks as long as the caller has locked no limit: each
--            transaction locks its first ones in the order of their keys, and does not wait for later ones
-- p_creates  create missing ones
CREATE OR REPLACE FUNCTION {schema}.lock_limits(p_keys text[], p_waits boolean, p_creates boolean)
RETURNS TABLE (address tid, key text, due bigint, data bytea)
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
    -- One lookup for each key, in the order of the keys: a join would read all limits of the store.
    IF p_waits THEN
        RETURN QUERY
        SELECT found.* FROM (SELECT name FROM unnest(p_keys) AS names (name) ORDER BY name) AS given, LATERAL (
            SELECT ctid, key, due, data FROM {schema}.documents WHERE kind = 'gate' AND key = given.name FOR UPDATE
        ) AS found;
    ELSE
        RETURN QUERY
        SELECT found.* FROM (SELECT name FROM unnest(p_keys) AS names (name) ORDER BY name) AS given, LATERAL (
            SELECT ctid, key, due, data FROM {schema}.documents WHERE kind = 'gate' AND key = given.name
            FOR UPDATE SKIP LOCKED
        ) AS found;
    END IF;
END $$;

-- Take claims out of their limits, offer the room to parked tasks, and let due tasks enter the limits or park them.
-- The caller claims the tasks that have entered.
-- p_claim    what to claim; NULL: nothing
-- p_left     the claims that leave
-- p_stays    those of them that do not leave, because they are not recorded
-- p_paused   the paused queues
-- p_queues, p_functions  the lanes of the claim
-- p_ready    the row addresses of the first tasks in these lanes, p_claim.size at most, locked; NULL: not read yet
-- returns    picked: the row addresses of the tasks to claim;
--            rest: 0 there are no others, or enough; 1 call again for the others; 2 the others need the rules
CREATE OR REPLACE FUNCTION {schema}.pass_limits(
    p_now bigint, p_claim {schema}.claim, p_due_by bigint, p_first_token bigint, p_left {schema}.leaving,
    p_stays bytea[], p_paused text[], p_queues text[], p_functions text[], p_ready tid[],
    OUT picked tid[], OUT rest int
)
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    c_forever CONSTANT bytea := '\xcf4000000000000000';
    c_most_offered CONSTANT int := 100;
    c_most_moves CONSTANT int := 1000;
    c_largest_page CONSTANT int := 500;
    -- The limits that are locked, by their number.
    v_keys text[];
    v_addresses tid[];
    v_dues bigint[];
    v_wakes bytea[];
    v_has_parked boolean[];
    v_parks bigint[];
    v_counts int[];
    v_items bytea[];
    v_more bytea[];
    v_sizes bigint[];
    v_is_changed boolean[];
    v_parks_now boolean[];
    -- A page of tasks: their row addresses, limits, what they are as holders, and whether they need the rules.
    v_rows tid[];
    v_limits text[];
    v_limit_sizes text[];
    v_holders bytea[];
    v_is_odd boolean[];
    v_is_offered boolean[];
    v_offered tid[] := '{}';
    v_wanted tid[] := '{}';
    v_parked tid[] := '{}';
    v_parked_under text[] := '{}';
    v_size int := CASE WHEN p_ready IS NULL THEN 0 ELSE p_claim.size END;
    v_ready int;
    v_at int;
    v_found int;
    v_last text;
    v_last_size text;
    v_limit_size bigint;
    v_holder bytea;
    v_other bytea;
    v_new text[];
    v_new_dues bigint[];
    v_states bytea[];
    v_rank bigint := -9223372036854775808;
    v_turn bigint := -9223372036854775808;
    v_seq bigint := -1;
BEGIN
    picked := '{}';
    rest := 0;
    -- Leave. A state that is damaged counts as empty.
    SELECT coalesce(array_agg(key), '{}'), array_agg(address), array_agg(due), coalesce(array_agg(data), '{}')
    INTO v_keys, v_addresses, v_dues, v_states FROM {schema}.lock_limits(p_left.keys, true, false);
    SELECT array_agg(wake), array_agg(has_parked), array_agg(parks), array_agg(coalesce(count, 0)), array_agg(items),
        array_agg(more)
    INTO v_wakes, v_has_parked, v_parks, v_counts, v_items, v_more FROM {schema}.unpack_limits(v_states);
    v_sizes := array_fill(NULL::bigint, array[cardinality(v_keys)]);
    v_is_changed := array_fill(true, array[cardinality(v_keys)]);
    FOR v_number IN 1..coalesce(cardinality(p_left.keys), 0) LOOP
        v_at := array_position(v_keys, p_left.keys[v_number]);
        CONTINUE WHEN v_at IS NULL;
        v_holder := p_left.holders[v_number];
        FOREACH v_other IN ARRAY p_stays LOOP
            v_holder := {schema}.without_holder(v_holder, v_other);
        END LOOP;
        v_found := octet_length(v_holder);
        IF v_found = octet_length(p_left.holders[v_number])
            AND substring(v_items[v_at], 1, v_found) = v_holder
        THEN
            -- Those that have entered first leave first.
            v_items[v_at] := substring(v_items[v_at], v_found + 1);
            v_counts[v_at] := v_counts[v_at] - coalesce(p_left.counts[v_number], p_left.counts[1]);
        ELSE
            WHILE v_holder <> '' LOOP
                v_found := {schema}.end_of_holder(v_holder || '\x00'::bytea, 1) - 1;
                v_other := {schema}.without_holder(v_items[v_at], substring(v_holder, 1, v_found));
                IF v_other <> v_items[v_at] THEN
                    v_items[v_at] := v_other;
                    v_counts[v_at] := v_counts[v_at] - 1;
                END IF;
                v_holder := substring(v_holder, v_found + 1);
            END LOOP;
        END IF;
        v_sizes[v_at] := coalesce(p_left.sizes[v_number], p_left.sizes[1]);
        IF v_more[v_at] = '' THEN
            v_wakes[v_at] := '';
            v_dues[v_at] := 0;
        ELSIF v_has_parked[v_at] THEN
            -- The next claim offers the room by the rules.
            v_wakes[v_at] := {schema}.packed(p_now);
            v_dues[v_at] := p_now;
        END IF;
    END LOOP;
    -- Offer the room of each limit to its first parked tasks, of each lot.
    IF true = ANY (v_has_parked) THEN
        SELECT coalesce(array_agg(first.address), '{}'), array_agg(lot.gate), array_agg(first.number = asked.room)
        INTO v_rows, v_limits, v_is_odd
        FROM {schema}.lots(array(
            SELECT key FROM unnest(v_keys, v_sizes, v_counts, v_has_parked, v_more)
                AS known (key, size, count, has_parked, more)
            WHERE has_parked AND size > count AND more = ''
        )) AS lot, LATERAL (
            SELECT least(v_sizes[known.at] - v_counts[known.at], c_most_offered) AS room
            FROM (SELECT array_position(v_keys, lot.gate)) AS known (at)
        ) AS asked, LATERAL (
            SELECT lot.first AS address, 1 AS number WHERE asked.room = 1
            UNION ALL
            (
                SELECT ctid, row_number() OVER (ORDER BY rank, turn, seq) FROM {schema}.live
                WHERE asked.room > 1 AND place = 3 AND parked = lot.gate AND live.queue = lot.queue
                    AND live.func_path = lot.func_path AND (crashes > 0) = lot.is_suspect
                ORDER BY rank, turn, seq LIMIT asked.room
            )
        ) AS first;
        SELECT coalesce(array_agg(first.ctid), '{}'), coalesce(array_agg(first.ctid) FILTER (
            WHERE crashes = 0 AND visible <= p_due_by AND queue <> ALL (p_paused)
                AND ((p_claim.wanted).queues IS NULL OR queue = ANY ((p_claim.wanted).queues))
                AND func_path <> ALL ((p_claim.wanted).excluded) AND EXISTS (
                    SELECT FROM unnest((p_claim.wanted).lows, (p_claim.wanted).highs) AS ranges (low, high)
                    WHERE func_path >= low AND func_path < high
                )
        ), '{}')
        INTO v_offered, v_wanted
        FROM (SELECT ctid, * FROM {schema}.live WHERE ctid = ANY (v_rows) FOR UPDATE SKIP LOCKED) AS first;
        FOR v_number IN 1..cardinality(v_keys) LOOP
            CONTINUE WHEN v_more[v_number] <> '';
            v_has_parked[v_number] := v_has_parked[v_number] AND v_counts[v_number] >= v_sizes[v_number];
            IF v_has_parked[v_number] THEN
                v_wakes[v_number] := c_forever;
                v_dues[v_number] := NULL;
            END IF;
        END LOOP;
        FOR v_number IN 1..cardinality(v_rows) LOOP
            v_at := array_position(v_keys, v_limits[v_number]);
            v_has_parked[v_at] := v_has_parked[v_at] OR v_is_odd[v_number];
            IF v_dues[v_at] = 0 THEN
                -- What was offered will enter, and then the limit has no room, or refill the limit.
                v_wakes[v_at] := c_forever;
                v_dues[v_at] := NULL;
            END IF;
            IF v_is_odd[v_number] AND v_sizes[v_at] - v_counts[v_at] > c_most_offered
                OR cardinality(v_offered) < cardinality(v_rows)
            THEN
                -- There is room for more, or another transaction changes one of them: the next claim asks again.
                v_has_parked[v_at] := true;
                v_wakes[v_at] := {schema}.packed(p_now);
                v_dues[v_at] := p_now;
            END IF;
        END LOOP;
    END IF;
    -- Enter, or park: a page of ready tasks, and the offered ones.
    WHILE p_claim.size IS NOT NULL LOOP
        IF p_ready IS NULL THEN
            -- Growing pages, because a page may consist of tasks that one limit blocks.
            v_size := greatest(p_claim.size - cardinality(picked) - cardinality(v_wanted), 2 * v_size, 1);
            v_size := least(v_size, c_largest_page);
            p_ready := CASE
                WHEN cardinality(p_functions) = 0 THEN '{}'
                ELSE (
                    SELECT next.picked
                    FROM {schema}.pick(p_queues, p_functions, v_size, p_due_by, v_rank, v_turn, v_seq) AS next
                )
            END;
        END IF;
        v_ready := cardinality(p_ready);
        EXIT WHEN v_ready + cardinality(v_wanted) = 0;
        SELECT array_agg(first.ctid), array_agg(first.gates[1]), array_agg(first.gates[2]),
            array_agg('\x92'::bytea || {schema}.packed(id) || {schema}.packed(greatest(token + 1, p_first_token))),
            array_agg(cardinality(first.gates) <> 2 OR cancel_requested OR coalesce(expires <= p_due_by, false)),
            array_agg(place = 3)
        INTO v_rows, v_limits, v_limit_sizes, v_holders, v_is_odd, v_is_offered
        FROM (
            SELECT ctid, id, token, gates, cancel_requested, expires, place FROM {schema}.live
            WHERE ctid = ANY (p_ready || v_wanted) ORDER BY rank, turn, seq
        ) AS first;
        v_new := array(
            SELECT DISTINCT name FROM unnest(v_limits) AS given (name)
            WHERE name IS NOT NULL AND array_position(v_keys, name) IS NULL
        );
        IF cardinality(v_new) > 0 THEN
            SELECT coalesce(array_agg(key), '{}'), v_addresses || array_agg(address), array_agg(due),
                coalesce(array_agg(data), '{}')
            INTO v_new, v_addresses, v_new_dues, v_states
            FROM {schema}.lock_limits(v_new, cardinality(v_keys) = 0, true);
            v_keys := v_keys || v_new;
            v_dues := v_dues || v_new_dues;
            v_is_changed := v_is_changed || array_fill(false, array[cardinality(v_new)]);
            SELECT v_wakes || array_agg(wake), v_has_parked || array_agg(has_parked), v_parks || array_agg(parks),
                v_counts || array_agg(count), v_items || array_agg(items), v_more || array_agg(more)
            INTO v_wakes, v_has_parked, v_parks, v_counts, v_items, v_more FROM {schema}.unpack_limits(v_states);
        END IF;
        v_last := '';
        v_last_size := '';
        FOR v_number IN 1..cardinality(v_rows) LOOP
            -- An offered task behind the last ready one of a full page has to wait for the next page.
            EXIT WHEN cardinality(picked) = p_claim.size OR v_ready = 0 AND cardinality(p_ready) = v_size;
            IF NOT v_is_offered[v_number] THEN
                v_ready := v_ready - 1;
            END IF;
            IF v_limits[v_number] IS NULL AND v_is_odd[v_number] IS NOT TRUE THEN
                picked := picked || v_rows[v_number];
                CONTINUE;
            END IF;
            IF v_last <> v_limits[v_number] OR v_last_size <> v_limit_sizes[v_number] THEN
                v_last := v_limits[v_number];
                v_last_size := v_limit_sizes[v_number];
                v_at := array_position(v_keys, v_last);
                v_limit_size := CASE WHEN v_last_size ~ '^=[0-9]{1,18}$' THEN substr(v_last_size, 2)::bigint END;
            END IF;
            IF v_is_odd[v_number] IS NOT FALSE OR v_limit_size IS NULL OR v_at IS NULL
                OR v_counts[v_at] IS NULL OR v_more[v_at] <> '' OR p_claim.due_by IS NOT NULL
            THEN
                rest := 2;
                EXIT;
            END IF;
            v_is_changed[v_at] := true;
            IF v_is_offered[v_number] THEN
                v_offered := array_remove(v_offered, v_rows[v_number]);
                v_wanted := array_remove(v_wanted, v_rows[v_number]);
            END IF;
            IF v_counts[v_at] >= v_limit_size THEN
                IF NOT v_is_offered[v_number] THEN
                    v_parked := v_parked || v_rows[v_number];
                    v_parked_under := v_parked_under || v_last;
                END IF;
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
            IF v_has_parked[v_at] AND v_counts[v_at] >= v_limit_size THEN
                v_wakes[v_at] := c_forever;
                v_dues[v_at] := NULL;
            END IF;
        END LOOP;
        EXIT WHEN rest > 0 OR cardinality(picked) = p_claim.size OR cardinality(p_ready) < v_size;
        IF cardinality(picked) + cardinality(v_parked) >= c_most_moves THEN
            rest := 1;
            EXIT;
        END IF;
        SELECT rank, turn, seq INTO v_rank, v_turn, v_seq FROM {schema}.live WHERE ctid = p_ready[v_size];
        p_ready := NULL;
    END LOOP;
    -- Write.
    IF cardinality(v_parked) > 0 THEN
        UPDATE {schema}.live SET place = 3, parked = given.parked
        FROM unnest(v_parked, v_parked_under) AS given (address, parked) WHERE live.ctid = given.address;
    END IF;
    IF cardinality(v_offered) > 0 THEN
        UPDATE {schema}.live SET parked = NULL, place = {schema}.place_of(NULL, visible, p_now, NULL, crashes)
        WHERE ctid = ANY (v_offered);
        IF {schema}.is_awaited('work') THEN
            PERFORM {schema}.tell_of_work(0);
        END IF;
    END IF;
    UPDATE {schema}.documents
    SET due = CASE WHEN given.has_parked OR given.more <> '' THEN given.due END,
        data = set_byte(
            '\x80'::bytea, 0,
            128 + (given.wake <> '')::int + given.has_parked::int + (given.parks > 0)::int
                + (given.more <> '')::int + (given.count > 0)::int
        )
            || CASE WHEN given.wake <> '' THEN '\xa777616b655f6174'::bytea || given.wake ELSE '' END
            || CASE WHEN given.has_parked THEN '\xaa6861735f7061726b6564c3'::bytea ELSE '' END
            || CASE WHEN given.parks > 0 THEN '\xa57061726b73'::bytea || {schema}.packed(given.parks) ELSE '' END
            || CASE WHEN given.more <> '' THEN '\xa46d6f7265'::bytea || given.more ELSE '' END
            || CASE
                WHEN given.count = 0 THEN ''
                WHEN given.count < 16
                    THEN set_byte('\xa7686f6c6465727300'::bytea, 8, 144 + given.count) || given.items
                ELSE '\xa7686f6c64657273dc'::bytea || substring(int4send(given.count), 3) || given.items
            END
    FROM unnest(v_addresses, v_dues, v_wakes, v_has_parked, v_parks, v_counts, v_items, v_more, v_is_changed)
        AS given (address, due, wake, has_parked, parks, count, items, more, is_changed)
    -- They are locked, so their addresses stay.
    WHERE documents.ctid = given.address AND given.is_changed
        AND (given.count > 0 OR given.has_parked OR given.more <> '');
    -- A state that says nothing any more.
    v_new := array(
        SELECT key FROM unnest(v_keys, v_has_parked, v_counts, v_more) AS given (key, has_parked, count, more)
        WHERE given.count = 0 AND NOT given.has_parked AND given.more = ''
    );
    IF cardinality(v_new) > 0 THEN
        DELETE FROM {schema}.documents WHERE kind = 'gate' AND key = ANY (v_new);
    END IF;
END $$;
