-- Write: the changes of one section, all of them or none.
-- {schema}  the store's schema
--
-- `live.id = ANY (array[given.id])`, not `live.id = given.id`: a plan that was made while the table was empty
-- must not read all of it.

-- Write the new state of live tasks; returns the ids of those that were written.
-- p_owner  NULL if the caller has locked the rows; else only rows that this owner holds with the given
--          token, and that were neither cancelled nor had documents attached
CREATE OR REPLACE FUNCTION {schema}.change_tasks(
    p_now bigint, p_tasks {schema}.task[], p_owner text
) RETURNS text[]
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    v_ids text[];
BEGIN
    WITH changed AS (
        UPDATE {schema}.live
        SET rank = given.rank, turn = given.turn, due = given.due, visible = given.visible,
            token = given.token, settled = given.settled, started_at = given.started_at,
            crashes = given.crashes, status = given.status,
            cancel_requested = given.cancel_requested, attached = given.attached,
            owner = given.owner, parked = given.parked, rest = given.rest,
            claim_id = CASE WHEN given.owner IS NOT NULL THEN live.claim_id END,
            place = {schema}.place_of(given.owner, given.visible, p_now, given.parked, given.crashes)
        FROM unnest(p_tasks) AS given
        WHERE live.id = ANY (array[given.id]) AND (
            p_owner IS NULL
            OR live.owner = p_owner AND live.token = given.token
                AND NOT live.cancel_requested AND NOT live.attached
        )
        RETURNING live.id
    )
    SELECT coalesce(array_agg(id), '{}') INTO v_ids FROM changed;
    RETURN v_ids;
END $$;

-- End tasks: move them from `live` to `finished`; returns the ids of those that have ended.
CREATE OR REPLACE FUNCTION {schema}.end_tasks(p_endings {schema}.endings) RETURNS text[]
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    v_ids text[];
BEGIN
    IF cardinality(p_endings.letters) > 0 THEN
        INSERT INTO {schema}.dead
        SELECT
            live.seq, live.rank, live.turn, live.due, live.visible, live.created_at, live.expires,
            live.token, coalesce(given.settled, p_endings.settled[1]), live.started_at,
            coalesce(given.crashes, p_endings.crashes[1]), coalesce(given.status, p_endings.statuses[1]),
            live.cancel_requested, live.id, live.queue, live.func_path,
            coalesce(given.rest, live.rest), live.body, given.failed_at, given.reason, given.letter
        FROM unnest(
            p_endings.ids, p_endings.settled, p_endings.crashes, p_endings.statuses, p_endings.rests,
            p_endings.letters, p_endings.failed_at, p_endings.reasons
        ) AS given (id, settled, crashes, status, rest, letter, failed_at, reason), {schema}.live
        WHERE given.letter IS NOT NULL AND live.id = ANY (array[given.id]);
    END IF;
    WITH ended AS (
        DELETE FROM {schema}.live
        USING unnest(
            p_endings.ids, p_endings.results, p_endings.holders, p_endings.tokens, p_endings.settled,
            p_endings.crashes, p_endings.statuses, p_endings.finished_at, p_endings.expires_at,
            p_endings.rests
        ) AS given (
            id, result, holder, token, settled, crashes, status, finished_at, expires_at, rest
        )
        WHERE live.id = ANY (array[given.id]) AND (
            coalesce(given.holder, p_endings.holders[1]) = ''
            OR live.owner = coalesce(given.holder, p_endings.holders[1])
                AND live.token = coalesce(given.token, p_endings.tokens[1])
                AND NOT live.cancel_requested AND NOT live.attached
        )
        RETURNING
            live.seq, live.rank, live.turn, live.due, live.visible, live.created_at, live.expires,
            live.token, coalesce(given.settled, p_endings.settled[1]), live.started_at,
            coalesce(given.crashes, p_endings.crashes[1]), coalesce(given.status, p_endings.statuses[1]),
            live.cancel_requested, live.id, live.queue, live.func_path,
            coalesce(given.rest, live.rest), live.body,
            coalesce(given.finished_at, p_endings.finished_at[1]),
            coalesce(given.expires_at, p_endings.expires_at[1]) AS expires_at,
            coalesce(given.result, p_endings.results[1])
    ),
    stored AS (
        INSERT INTO {schema}.finished SELECT * FROM ended WHERE expires_at > 0
    )
    SELECT coalesce(array_agg(id), '{}') INTO v_ids FROM ended;
    PERFORM {schema}.tell_of_results(v_ids);
    RETURN v_ids;
END $$;

-- Change documents. Each key is given once, in order, so that two sections do not wait for each other.
CREATE OR REPLACE FUNCTION {schema}.change_documents(p_changes {schema}.document_change[]) RETURNS void
LANGUAGE plpgsql VOLATILE {pinned} AS $$
DECLARE
    v_change {schema}.document_change;
    v_count bigint;
BEGIN
    IF (
        SELECT bool_and(
            condition = 0 AND before IS NOT NULL AND after IS NOT NULL AND kind <> 'store'
        ) FROM unnest(p_changes)
    ) THEN
        -- What a claim through gates writes. `ANY`: see the beginning of this file.
        UPDATE {schema}.documents SET due = given.due, data = given.after
        FROM unnest(p_changes) AS given
        WHERE documents.kind = ANY (array[given.kind]) AND documents.key = ANY (array[given.key])
            AND documents.data = given.before;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count < cardinality(p_changes) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
        RETURN;
    END IF;
    FOREACH v_change IN ARRAY p_changes LOOP
        IF v_change.condition = 1 AND v_change.after IS NULL THEN
            DELETE FROM {schema}.documents WHERE kind = v_change.kind AND key = v_change.key;
        ELSIF v_change.condition = 1 THEN
            INSERT INTO {schema}.documents (kind, key, due, data)
            VALUES (v_change.kind, v_change.key, v_change.due, v_change.after)
            ON CONFLICT (kind, key) DO UPDATE SET due = excluded.due, data = excluded.data;
        ELSIF v_change.before IS NULL THEN
            -- Fails if another section has written the document first.
            INSERT INTO {schema}.documents (kind, key, due, data)
            SELECT v_change.kind, v_change.key, v_change.due, v_change.after
            WHERE v_change.after IS NOT NULL;
        ELSE
            IF v_change.after IS NULL THEN
                DELETE FROM {schema}.documents
                WHERE kind = v_change.kind AND key = v_change.key AND data = v_change.before;
            ELSE
                UPDATE {schema}.documents SET due = v_change.due, data = v_change.after
                WHERE kind = v_change.kind AND key = v_change.key AND data = v_change.before;
            END IF;
            IF NOT FOUND AND v_change.condition = 0 THEN
                PERFORM {schema}.refuse_moved();
            END IF;
        END IF;
        IF v_change.kind = 'store' THEN
            PERFORM {schema}.begin_epoch(v_change.due);
        END IF;
    END LOOP;
END $$;

-- Write the changes of a section.
-- p_owner     the owner that claims, or whose outcomes are recorded
-- p_now       the store's time in this section
-- p_checked   rows that must be as they were read, in id order
-- p_held      rows that p_owner must still hold, and that were neither cancelled nor had documents attached
-- p_free      rows to claim, which are left out if they are not as they were read
-- p_gated     rows to claim that must be as they were read, in id order
-- p_claim_id  written to the claimed rows, so that a call whose reply was lost is recognized
-- p_moved     rows that are parked, or return to the ready order, and do not change otherwise
-- p_changed   new states of rows that are among p_checked, p_held or p_inserted; with a body, also a new queue and body
-- returns     the ids of p_free that were claimed
-- Fails with OQ001 if something has changed meanwhile, OQ002 and the owner as the message if it has no lease, OQ003
-- and the bound if there would be more waiting tasks, and with a unique violation if an id or a document exists
-- already: see `connection.py`.
CREATE OR REPLACE FUNCTION {schema}.write(
    p_owner text, p_now bigint, p_checked {schema}.read_tasks, p_held {schema}.held_tasks,
    p_free {schema}.read_tasks, p_gated {schema}.read_tasks, p_claim_id text,
    p_moved {schema}.moved_tasks,
    p_changed {schema}.task[],
    p_ended {schema}.endings, p_inserted {schema}.new_tasks, p_bound bigint,
    p_documents {schema}.document_change[], p_deleted_finished text[], p_finished_before bigint,
    p_deleted_dead text[]
) RETURNS text[]
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_free tid[] := '{}';
    v_claimed text[] := '{}';
    v_count bigint;
    v_first_token bigint;
BEGIN
    p_checked.ids := {schema}.ids_of(p_checked.ids);
    p_held.ids := {schema}.ids_of(p_held.ids);
    p_free.ids := {schema}.ids_of(p_free.ids);
    p_gated.ids := {schema}.ids_of(p_gated.ids);
    p_moved.ids := {schema}.ids_of(p_moved.ids);
    p_ended.ids := {schema}.ids_of(p_ended.ids);
    IF cardinality(p_free.ids) + cardinality(p_gated.ids) > 0 THEN
        v_first_token := {schema}.first_token(p_owner);
        IF v_first_token IS NULL THEN
            RAISE EXCEPTION '%', p_owner USING ERRCODE = 'OQ002';
        END IF;
    END IF;
    -- Before any row is locked: this is what many sections change.
    IF cardinality(p_documents) > 0 AND EXISTS (
        SELECT FROM unnest(p_documents) AS given
        WHERE given.condition = 0 AND given.before IS DISTINCT FROM (
            SELECT data FROM {schema}.documents
            WHERE documents.kind = given.kind AND documents.key = given.key
        )
    ) THEN
        PERFORM {schema}.refuse_moved();
    END IF;
    IF cardinality(p_checked.ids) > 0 THEN
        SELECT count(*) INTO v_count FROM (
            SELECT FROM unnest(p_checked.ids, p_checked.versions) AS given (id, version), {schema}.live
            WHERE live.id = ANY (array[given.id]) AND live.xmin = coalesce(given.version, p_checked.versions[1])
            FOR UPDATE OF live
        ) AS locked;
        IF v_count < cardinality(p_checked.ids) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    IF cardinality(p_held.ids) > 0 THEN
        SELECT count(*) INTO v_count FROM (
            SELECT FROM unnest(p_held.ids, p_held.tokens) AS given (id, token), {schema}.live
            WHERE live.id = ANY (array[given.id]) AND live.owner = p_owner AND live.token = given.token
                AND NOT live.cancel_requested AND NOT live.attached
            FOR UPDATE OF live
        ) AS locked;
        IF v_count < cardinality(p_held.ids) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    -- What `row_rules.claim` does to a row, in one statement for all rows of the claim.
    IF cardinality(p_gated.ids) > 0 THEN
        UPDATE {schema}.live
        SET place = 4, status = 1, owner = p_owner, token = greatest(token + 1, v_first_token),
            started_at = p_now, parked = NULL, claim_id = p_claim_id
        FROM unnest(p_gated.ids, p_gated.versions) AS given (id, version)
        WHERE live.id = ANY (array[given.id]) AND live.xmin = coalesce(given.version, p_gated.versions[1]);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count < cardinality(p_gated.ids) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    IF cardinality(p_moved.ids) > 0 THEN
        UPDATE {schema}.live
        SET parked = given.parked,
            place = {schema}.place_of(owner, visible, p_now, given.parked, crashes)
        FROM unnest(p_moved.ids, p_moved.versions, p_moved.parked) AS given (id, version, parked)
        WHERE live.id = ANY (array[given.id]) AND live.xmin = coalesce(given.version, p_moved.versions[1]);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count < cardinality(p_moved.ids) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    IF cardinality(p_free.ids) > 0 THEN
        v_free := array(
            SELECT live.ctid FROM unnest(p_free.ids, p_free.versions) AS given (id, version), {schema}.live
            WHERE live.id = ANY (array[given.id]) AND live.xmin = coalesce(given.version, p_free.versions[1])
            FOR UPDATE OF live SKIP LOCKED
        );
        WITH claimed AS (
            UPDATE {schema}.live
            SET place = 4, status = 1, owner = p_owner, token = greatest(token + 1, v_first_token),
                started_at = p_now, parked = NULL, claim_id = p_claim_id
            WHERE ctid = ANY (v_free) RETURNING id
        )
        SELECT array_agg(id) INTO v_claimed FROM claimed;
    END IF;
    IF cardinality(p_ended.ids) > 0
        AND cardinality({schema}.end_tasks(p_ended)) < cardinality(p_ended.ids)
    THEN
        PERFORM {schema}.refuse_moved();
    END IF;
    IF cardinality(p_deleted_finished) > 0 THEN
        DELETE FROM {schema}.finished
        WHERE id = ANY (p_deleted_finished)
            AND (p_finished_before IS NULL OR finished_at < p_finished_before);
    END IF;
    IF cardinality(p_deleted_dead) > 0 THEN
        DELETE FROM {schema}.dead WHERE id = ANY (p_deleted_dead);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        -- A dead letter that is revived must still be there.
        IF v_count < cardinality(p_deleted_dead) AND cardinality(p_inserted.ids) > 0 THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    IF cardinality(p_documents) > 0 THEN
        PERFORM {schema}.change_documents(p_documents);
    END IF;
    IF cardinality(p_inserted.ids) > 0 THEN
        PERFORM {schema}.enqueue(p_now, p_inserted, 0, p_bound, '{}', false);
    END IF;
    IF cardinality(p_changed) > 0 THEN
        PERFORM {schema}.notify('c' || given.id)
        FROM unnest(p_changed) AS given, {schema}.live
        WHERE live.id = ANY (array[given.id]) AND given.cancel_requested AND NOT live.cancel_requested;
        PERFORM {schema}.change_tasks(p_now, p_changed, NULL);
        UPDATE {schema}.live SET queue = given.queue, body = given.body
        FROM unnest(p_changed) AS given
        WHERE given.body IS NOT NULL AND live.id = ANY (array[given.id]);
    END IF;
    -- Tasks that return to the ready order, or a queue that is no longer paused.
    IF (
        array_position(p_moved.parked, NULL) IS NOT NULL
        OR EXISTS (SELECT FROM unnest(p_changed) WHERE owner IS NULL AND parked IS NULL)
        OR EXISTS (SELECT FROM unnest(p_documents) WHERE kind = 'paused_queue' AND after IS NULL)
    ) AND {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(0);
    END IF;
    RETURN coalesce(v_claimed, '{}');
END $$;

-- Refuse new tasks if one of their ids is that of a task that has ended, after deleting expired records.
CREATE OR REPLACE FUNCTION {schema}.refuse_taken(p_ids text[], p_now bigint) RETURNS void
LANGUAGE plpgsql VOLATILE {pinned} AS $$
BEGIN
    DELETE FROM {schema}.finished WHERE id = ANY (p_ids) AND expires_at <= p_now;
    IF EXISTS (SELECT FROM {schema}.finished WHERE id = ANY (p_ids))
        OR EXISTS (SELECT FROM {schema}.dead WHERE id = ANY (p_ids))
    THEN
        PERFORM {schema}.refuse_moved();
    END IF;
END $$;

-- Insert new tasks, in the order given: the part of `write` that reads nothing.
-- p_visible     when the first of them is due
-- p_bound       the largest number of waiting tasks, or NULL for no bound
-- p_is_certain  whether to notify even if no storage waits now: one may begin to wait before the commit
CREATE OR REPLACE FUNCTION {schema}.enqueue(
    p_now bigint, p_tasks {schema}.new_tasks, p_visible bigint, p_bound bigint,
    p_documents {schema}.document_change[], p_is_certain boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE {settings} AS $$
BEGIN
    p_tasks.ids := {schema}.ids_of(p_tasks.ids);
    IF p_bound IS NOT NULL THEN
        -- Held until the tasks are counted: one enqueue at a time.
        PERFORM pg_advisory_xact_lock({schema}.lock_key('room'));
    END IF;
    INSERT INTO {schema}.live (
        id, body, queue, func_path, rank, turn, due, visible, created_at, rest, expires, gates, place
    )
    SELECT
        given.id, coalesce(given.body, p_tasks.bodies[1]), coalesce(given.queue, p_tasks.queues[1]),
        coalesce(given.func_path, p_tasks.func_paths[1]), coalesce(given.rank, p_tasks.ranks[1]),
        coalesce(given.turn, p_tasks.turns[1]), coalesce(given.due, p_tasks.dues[1]),
        coalesce(given.visible, p_tasks.visibles[1]), coalesce(given.created_at, p_tasks.created_at[1]),
        coalesce(given.rest, p_tasks.rests[1]), given.expires, given.gates,
        CASE WHEN coalesce(given.visible, p_tasks.visibles[1]) > p_now THEN 2 ELSE 0 END
    FROM unnest(
        p_tasks.ids, p_tasks.bodies, p_tasks.queues, p_tasks.func_paths, p_tasks.ranks, p_tasks.turns,
        p_tasks.dues, p_tasks.visibles, p_tasks.created_at, p_tasks.rests, p_tasks.expires, p_tasks.gates
    ) AS given (
        id, body, queue, func_path, rank, turn, due, visible, created_at, rest, expires, gates
    );
    -- Checked after the insert: a task with that id may have ended while the insert waited.
    IF EXISTS (SELECT FROM {schema}.finished WHERE id = ANY (p_tasks.ids))
        OR EXISTS (SELECT FROM {schema}.dead WHERE id = ANY (p_tasks.ids))
    THEN
        PERFORM {schema}.refuse_taken(p_tasks.ids, p_now);
    END IF;
    IF cardinality(p_documents) > 0 THEN
        PERFORM {schema}.change_documents(p_documents);
    END IF;
    IF p_bound IS NOT NULL AND (
        SELECT count(*) FROM (SELECT FROM {schema}.live WHERE place <> 4 LIMIT p_bound + 1) AS waiting
    ) > p_bound THEN
        -- Last: an id or a unique key that is taken comes first.
        RAISE EXCEPTION '%', p_bound USING ERRCODE = 'OQ003';
    END IF;
    IF p_is_certain OR {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(p_visible);
    END IF;
END $$;

-- `enqueue` of one task, without a bound and without documents: at half the cost.
CREATE OR REPLACE FUNCTION {schema}.enqueue_one(p_now bigint, p_task {schema}.new_task) RETURNS void
LANGUAGE plpgsql VOLATILE {settings} AS $$
BEGIN
    INSERT INTO {schema}.live (
        id, body, queue, func_path, rank, turn, due, visible, created_at, rest, expires, gates, place
    )
    VALUES (
        p_task.id, p_task.body, p_task.queue, p_task.func_path, p_task.rank, p_task.turn, p_task.due,
        p_task.visible, p_task.created_at, p_task.rest, p_task.expires, p_task.gates,
        CASE WHEN p_task.visible > p_now THEN 2 ELSE 0 END
    );
    IF EXISTS (SELECT FROM {schema}.finished WHERE id = p_task.id)
        OR EXISTS (SELECT FROM {schema}.dead WHERE id = p_task.id)
    THEN
        PERFORM {schema}.refuse_taken(array[p_task.id], p_now);
    END IF;
    IF {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(p_task.visible);
    END IF;
END $$;

-- `enqueue` in a transaction of the caller, for any driver: one text in, one text out.
-- p_request  JSON: {"store", "now", "tasks": {ids, bodies, …}, "visible", "bound",
--            "documents": [{kind, key, …}]}; binary values are in PostgreSQL's hexadecimal form
-- returns    what was refused: 'store' (this is another store), 'moved', 'full'; '' if nothing was
-- All other enqueues would wait for the lock of the bound until the caller commits. So the tasks are counted without
-- it, and the bound may be passed by what transactions of callers hold that are open at the same time.
CREATE OR REPLACE FUNCTION {schema}.enqueue_text(p_request text) RETURNS text
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_request jsonb := p_request::jsonb;
    v_bound bigint := v_request ->> 'bound';
BEGIN
    IF NOT {schema}.is_store(v_request ->> 'store') THEN
        RETURN 'store';
    END IF;
    PERFORM {schema}.enqueue(
        (v_request ->> 'now')::bigint,
        jsonb_populate_record(NULL::{schema}.new_tasks, v_request -> 'tasks'),
        (v_request ->> 'visible')::bigint, NULL,
        array(SELECT jsonb_populate_recordset(
            NULL::{schema}.document_change, v_request -> 'documents'
        )),
        true
    );
    IF v_bound IS NOT NULL AND (
        SELECT count(*) FROM (SELECT FROM {schema}.live WHERE place <> 4 LIMIT v_bound + 1) AS waiting
    ) > v_bound THEN
        RAISE EXCEPTION '%', v_bound USING ERRCODE = 'OQ003';
    END IF;
    RETURN '';
EXCEPTION
    WHEN SQLSTATE 'OQ001' OR unique_violation THEN
        RETURN 'moved';
    WHEN SQLSTATE 'OQ003' THEN
        RETURN 'full';
END $$;

-- Read records and documents in a transaction of the caller, for any driver.
-- p_request  JSON: {"store", "now", "ids": […], "bodies", "kind", "keys": […]}; "bodies": also those of live tasks
-- returns    JSON: {"tasks": [{id, queue, …, is_live}], "documents": [{key, data}]}; 'store' for another store
CREATE OR REPLACE FUNCTION {schema}.read_text(p_request text) RETURNS text
LANGUAGE plpgsql VOLATILE {settings} AS $$
DECLARE
    v_request jsonb := p_request::jsonb;
    v_ids text[] := array(SELECT jsonb_array_elements_text(v_request -> 'ids'));
    v_keys text[] := array(SELECT jsonb_array_elements_text(v_request -> 'keys'));
BEGIN
    IF NOT {schema}.is_store(v_request ->> 'store') THEN
        RETURN 'store';
    END IF;
    RETURN jsonb_build_object(
        'tasks', (
            SELECT coalesce(jsonb_agg(task), '[]') FROM (
                SELECT to_jsonb(live) - 'body' || '{"is_live": true}' || CASE
                    WHEN (v_request ->> 'bodies')::boolean
                    THEN jsonb_build_object('body', {schema}.fitting(body))
                    ELSE '{}'
                END AS task
                FROM {schema}.live WHERE id = ANY (v_ids)
                UNION ALL
                SELECT to_jsonb(finished) - 'body' FROM {schema}.finished
                WHERE id = ANY (v_ids) AND expires_at > (v_request ->> 'now')::bigint
                UNION ALL
                SELECT to_jsonb(dead) - 'body' FROM {schema}.dead WHERE id = ANY (v_ids)
            ) AS tasks
        ),
        'documents', (
            SELECT coalesce(jsonb_agg(to_jsonb(documents)), '[]') FROM {schema}.documents
            WHERE kind = v_request ->> 'kind' AND key = ANY (v_keys)
        )
    )::text;
END $$;

-- Whether this is the store that a storage was opened on: a schema of the same name in another database has
-- another id.
CREATE OR REPLACE FUNCTION {schema}.is_store(p_store text) RETURNS boolean
LANGUAGE sql VOLATILE {pinned} AS $$
    SELECT EXISTS (
        SELECT FROM {schema}.documents
        WHERE kind = 'store' AND key = 'store' AND starts_with(encode(data, 'hex'), p_store)
    )
$$;
