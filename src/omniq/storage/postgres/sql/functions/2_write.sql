-- Write: the changes of one section, all of them or none.
-- {schema}  the store's schema
--
-- `live.id = ANY (…)` beside a join: a plan that was made while the table was empty must not read all of it.

-- Write the new state of live tasks; returns the ids of those that were written.
-- p_owner  NULL if the caller has locked the rows; else only rows that this owner holds with the given
--          token, and that was neither cancelled nor attached documents to
CREATE OR REPLACE FUNCTION {schema}.change_tasks(
    p_now bigint, p_tasks {schema}.task[], p_owner text
) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
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
        WHERE live.id = given.id AND live.id = ANY (array(SELECT id FROM unnest(p_tasks))) AND (
            p_owner IS NULL
            OR live.owner = p_owner AND live.token = given.token AND live.gates IS NULL
                AND NOT live.cancel_requested AND NOT live.attached
        )
        RETURNING live.id
    )
    SELECT coalesce(array_agg(id), '{}') FROM changed
$$;

-- End tasks: move them from `live` to `finished`; returns the ids of those that have ended.
-- p_owner  as in `change_tasks`
CREATE OR REPLACE FUNCTION {schema}.end_tasks(p_endings {schema}.ending[], p_owner text) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids text[];
BEGIN
    WITH ended AS (
        DELETE FROM {schema}.live
        USING unnest(p_endings) AS given
        WHERE live.id = given.id AND live.id = ANY (array(SELECT id FROM unnest(p_endings))) AND (
            p_owner IS NULL
            OR live.owner = p_owner AND live.token = given.token AND live.gates IS NULL
                AND NOT live.cancel_requested AND NOT live.attached
        )
        RETURNING
            live.seq, live.rank, live.turn, live.due, live.visible, live.created_at, live.expires,
            live.token, given.settled, live.started_at, given.crashes, given.status,
            live.cancel_requested, live.id, live.queue, live.func_path,
            coalesce(given.rest, live.rest) AS rest, live.body, given.finished_at, given.expires_at,
            given.result
    ),
    stored AS (
        INSERT INTO {schema}.finished SELECT * FROM ended WHERE expires_at IS NOT NULL
    )
    SELECT coalesce(array_agg(id), '{}') INTO v_ids FROM ended;
    PERFORM {schema}.tell_of_results(v_ids);
    RETURN v_ids;
END $$;

-- Store the dead letters of tasks that are about to end.
CREATE OR REPLACE FUNCTION {schema}.bury(p_endings {schema}.ending[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO {schema}.dead
    SELECT
        live.seq, live.rank, live.turn, live.due, live.visible, live.created_at, live.expires, live.token,
        given.settled, live.started_at, given.crashes, given.status, live.cancel_requested, live.id,
        live.queue, live.func_path, given.rest, live.body, given.failed_at, given.reason, given.letter
    FROM unnest(p_endings) AS given, {schema}.live
    WHERE given.letter IS NOT NULL AND live.id = given.id
        AND live.id = ANY (array(SELECT id FROM unnest(p_endings)))
$$;

-- Change documents. Each key is given once, in order, so that two sections do not wait for each other.
CREATE OR REPLACE FUNCTION {schema}.change_documents(p_changes {schema}.document_change[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_change {schema}.document_change;
BEGIN
    -- One by one: a join could be planned for a table that was empty then.
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
    END LOOP;
END $$;

-- Write the changes of a section.
-- p_owner                 the owner that claims, or NULL
-- p_now                   the store's time in this section
-- p_ids, p_versions       the rows that must be as they were read, in id order
-- p_free, p_free_versions rows to claim, which are left out if they are not as they were read
-- p_gated                 rows to claim that are among p_ids
-- p_claim_id              written to the claimed rows, so that a call whose reply was lost is recognized
-- p_wakes                 whether there may be work for the storages that wait
-- returns                 the ids of p_free that were claimed
-- Fails with OQ001 if something has changed meanwhile, OQ002 if the owner has no lease, OQ003 if there would
-- be too many waiting tasks, and with a unique violation if an id or a document exists already.
CREATE OR REPLACE FUNCTION {schema}.write(
    p_owner text, p_now bigint, p_ids text[], p_versions xid[], p_free text[],
    p_free_versions xid[], p_gated text[], p_claim_id text, p_changed {schema}.task[],
    p_ended {schema}.ending[], p_inserted {schema}.task[], p_bound bigint,
    p_documents {schema}.document_change[], p_deleted_finished text[], p_deleted_dead text[],
    p_wakes boolean
) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_claimed text[] := '{}';
    v_count bigint;
BEGIN
    IF p_owner IS NOT NULL AND NOT {schema}.has_lease(p_owner) THEN
        RAISE EXCEPTION 'no lease' USING ERRCODE = 'OQ002';
    END IF;
    -- Before any row is locked: this is what many sections change.
    IF EXISTS (
        SELECT FROM unnest(p_documents) AS given
        WHERE given.condition = 0 AND given.before IS DISTINCT FROM (
            SELECT data FROM {schema}.documents
            WHERE documents.kind = given.kind AND documents.key = given.key
        )
    ) THEN
        PERFORM {schema}.refuse_moved();
    END IF;
    IF cardinality(p_ids) > 0 THEN
        SELECT count(*) INTO v_count FROM (
            SELECT FROM unnest(p_ids, p_versions) AS given (id, version), {schema}.live
            WHERE live.id = given.id AND live.id = ANY (p_ids) AND live.xmin = given.version
            FOR UPDATE OF live
        ) AS locked;
        IF v_count < cardinality(p_ids) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    IF cardinality(p_free) > 0 THEN
        v_claimed := array(
            SELECT live.id FROM unnest(p_free, p_free_versions) AS given (id, version), {schema}.live
            WHERE live.id = given.id AND live.id = ANY (p_free) AND live.xmin = given.version
            FOR UPDATE OF live SKIP LOCKED
        );
    END IF;
    -- What `row_rules.claim` does to a row, in one statement for all rows of the claim.
    UPDATE {schema}.live
    SET place = 4, status = 1, owner = p_owner, token = token + 1, started_at = p_now, parked = NULL,
        claim_id = p_claim_id
    WHERE id = ANY (v_claimed || p_gated);
    IF cardinality(p_changed) > 0 THEN
        PERFORM pg_notify('{channel}', 'c' || given.id)
        FROM unnest(p_changed) AS given, {schema}.live
        WHERE live.id = given.id AND given.cancel_requested AND NOT live.cancel_requested;
        PERFORM {schema}.change_tasks(p_now, p_changed, NULL);
    END IF;
    IF cardinality(p_ended) > 0 THEN
        PERFORM {schema}.bury(p_ended);
        PERFORM {schema}.end_tasks(p_ended, NULL);
    END IF;
    DELETE FROM {schema}.finished WHERE id = ANY (p_deleted_finished);
    DELETE FROM {schema}.dead WHERE id = ANY (p_deleted_dead);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF cardinality(p_documents) > 0 THEN
        PERFORM {schema}.change_documents(p_documents);
    END IF;
    IF cardinality(p_inserted) > 0 THEN
        IF v_count < cardinality(p_deleted_dead) THEN
            PERFORM {schema}.refuse_moved();
        END IF;
        PERFORM {schema}.enqueue(
            NULL, p_now, array(SELECT (
                id, queue, func_path, rank, turn, due, visible, created_at, expires, rest, body, gates
            )::{schema}.new_task FROM unnest(p_inserted)),
            array(SELECT id FROM unnest(p_inserted)), 0, p_bound, '{}', false
        );
        PERFORM {schema}.change_tasks(p_now, p_inserted, NULL);
    END IF;
    IF p_wakes AND {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(0);
    END IF;
    RETURN v_claimed;
END $$;

-- Insert new tasks, in the order given: the part of `write` that reads nothing.
-- p_ids         the ids of the tasks
-- p_visible     when the first of them is due
-- p_bound       the largest number of waiting tasks, or NULL for no bound
-- p_is_certain  whether to notify even if no storage waits now: one may begin to wait before the commit
CREATE OR REPLACE FUNCTION {schema}.enqueue(
    p_owner text, p_now bigint, p_tasks {schema}.new_task[], p_ids text[], p_visible bigint,
    p_bound bigint, p_documents {schema}.document_change[], p_is_certain boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_bound IS NOT NULL THEN
        -- Held until the tasks are counted: one enqueue at a time.
        PERFORM pg_advisory_xact_lock({schema}.lock_key('room'));
    END IF;
    INSERT INTO {schema}.live (
        id, queue, func_path, rank, turn, due, visible, created_at, expires, rest, body, gates, place
    )
    SELECT
        id, queue, func_path, rank, turn, due, visible, created_at, expires, rest, body, gates,
        CASE WHEN visible > p_now THEN 2 ELSE 0 END
    FROM unnest(p_tasks);
    -- Checked after the insert: a task with that id may have ended while the insert waited.
    IF EXISTS (SELECT FROM {schema}.finished WHERE id = ANY (p_ids))
        OR EXISTS (SELECT FROM {schema}.dead WHERE id = ANY (p_ids))
    THEN
        DELETE FROM {schema}.finished WHERE id = ANY (p_ids) AND expires_at <= p_now;
        IF EXISTS (SELECT FROM {schema}.finished WHERE id = ANY (p_ids))
            OR EXISTS (SELECT FROM {schema}.dead WHERE id = ANY (p_ids))
        THEN
            PERFORM {schema}.refuse_moved();
        END IF;
    END IF;
    IF cardinality(p_documents) > 0 THEN
        PERFORM {schema}.change_documents(p_documents);
    END IF;
    IF p_bound IS NOT NULL AND (
        SELECT count(*) FROM (SELECT FROM {schema}.live WHERE place <> 4 LIMIT p_bound + 1) AS waiting
    ) > p_bound THEN
        -- Last: an id or a unique key that is taken comes first.
        RAISE EXCEPTION 'full' USING ERRCODE = 'OQ003';
    END IF;
    IF p_is_certain OR {schema}.is_awaited('work') THEN
        PERFORM {schema}.tell_of_work(p_visible);
    END IF;
END $$;

-- `enqueue` in a transaction of the caller, for any driver: one text in, one text out.
-- p_request  JSON: {"store", "now", "tasks": [{id, queue, …}], "ids", "visible", "bound",
--            "documents": [{kind, key, …}]}; binary values are in PostgreSQL's hexadecimal form
-- returns    what was refused: 'store' (this is another store), 'moved', 'full'; '' if nothing was
CREATE OR REPLACE FUNCTION {schema}.enqueue_text(p_request text) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_request jsonb := p_request::jsonb;
BEGIN
    PERFORM {schema}.use_indexes();
    IF NOT {schema}.is_store(v_request ->> 'store') THEN
        RETURN 'store';
    END IF;
    PERFORM {schema}.enqueue(
        NULL, (v_request ->> 'now')::bigint,
        array(SELECT jsonb_populate_recordset(NULL::{schema}.new_task, v_request -> 'tasks')),
        array(SELECT jsonb_array_elements_text(v_request -> 'ids')),
        (v_request ->> 'visible')::bigint, (v_request ->> 'bound')::bigint,
        array(SELECT jsonb_populate_recordset(
            NULL::{schema}.document_change, v_request -> 'documents'
        )),
        true
    );
    RETURN '';
EXCEPTION
    WHEN SQLSTATE 'OQ001' OR unique_violation THEN
        RETURN 'moved';
    WHEN SQLSTATE 'OQ003' THEN
        RETURN 'full';
END $$;

-- Read records and documents in a transaction of the caller, for any driver.
-- p_request  JSON: {"store", "now", "ids": […], "kind", "keys": […]}
-- returns    JSON: {"tasks": [{id, queue, …, is_live}], "documents": [{key, data}]}; 'store' for another store
CREATE OR REPLACE FUNCTION {schema}.read_text(p_request text) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_request jsonb := p_request::jsonb;
    v_ids text[] := array(SELECT jsonb_array_elements_text(v_request -> 'ids'));
    v_keys text[] := array(SELECT jsonb_array_elements_text(v_request -> 'keys'));
BEGIN
    PERFORM {schema}.use_indexes();
    IF NOT {schema}.is_store(v_request ->> 'store') THEN
        RETURN 'store';
    END IF;
    RETURN jsonb_build_object(
        'tasks', (
            SELECT coalesce(jsonb_agg(task), '[]') FROM (
                SELECT to_jsonb(live) - 'body' || '{"is_live": true}' AS task
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
LANGUAGE sql VOLATILE AS $$
    SELECT EXISTS (
        SELECT FROM {schema}.documents
        WHERE kind = 'store' AND key = 'store' AND encode(data, 'hex') = p_store
    )
$$;
