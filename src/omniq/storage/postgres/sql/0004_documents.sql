-- Version 4: rows with one value for all fields that no statement uses, and one table of documents. A
-- store of version 3 is converted; its functions are replaced.
-- {schema}  the store's schema

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN SELECT oid FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace LOOP
        EXECUTE format('DROP FUNCTION %s', v_function);
    END LOOP;
END $$;

ALTER TABLE {schema}.live RENAME TO old_live;
ALTER TABLE {schema}.finished RENAME TO old_finished;
ALTER TABLE {schema}.dead RENAME TO old_dead;
ALTER INDEX {schema}.live_pkey RENAME TO old_live_pkey;
ALTER INDEX {schema}.finished_pkey RENAME TO old_finished_pkey;
ALTER INDEX {schema}.dead_pkey RENAME TO old_dead_pkey;
DROP INDEX {schema}.live_ready, {schema}.live_delayed, {schema}.live_parked, {schema}.live_held,
    {schema}.live_held_suspects, {schema}.live_unique, {schema}.live_retrying,
    {schema}.finished_expiry, {schema}.finished_badly;

-- `place` is the state that claims search by: 0 ready, 1 ready and a suspect (it has crashed a worker),
-- 2 not due yet, 3 parked under a gate, 4 held by `owner`.
-- `rank` is the bitwise complement of the priority: the lowest rank is claimed first.
-- `status`: 0 pending, 1 running, 2 retrying, 3 success, 4 failed, 5 cancelled.
-- `gates` are the keys of the task's limits and breakers, NULL if it has none.
-- `rest` has all other fields of the row, `claim_id` the call that claimed it.
--
-- Every task is updated at its claim and deleted at its end. Autovacuum starts early and runs without
-- a cost delay; otherwise claims would have to skip many dead index entries.
CREATE TABLE {schema}.live (
    seq              bigint   NOT NULL DEFAULT nextval('{schema}.seq'),
    rank             bigint   NOT NULL,
    turn             bigint   NOT NULL,
    due              bigint   NOT NULL,
    visible          bigint   NOT NULL,
    created_at       bigint   NOT NULL,
    expires          bigint,
    token            bigint   NOT NULL DEFAULT 0,
    settled          bigint   NOT NULL DEFAULT 0,
    started_at       bigint   NOT NULL DEFAULT 0,
    crashes          integer  NOT NULL DEFAULT 0,
    place            smallint NOT NULL,
    status           smallint NOT NULL DEFAULT 0,
    cancel_requested boolean  NOT NULL DEFAULT false,
    attached         boolean  NOT NULL DEFAULT false,
    id               text     COLLATE "C" NOT NULL PRIMARY KEY,
    queue            text     COLLATE "C" NOT NULL,
    func_path        text     COLLATE "C" NOT NULL,
    owner            text     COLLATE "C",
    claim_id         text     COLLATE "C",
    parked           text     COLLATE "C",
    gates            text[]   COLLATE "C",
    rest             bytea    NOT NULL,
    body             bytea    NOT NULL
) WITH (
    fillfactor = 90,
    autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_threshold = 5000, autovacuum_analyze_scale_factor = 0.05
);
COMMENT ON TABLE {schema}.live IS 'omniq: tasks that have not ended';

CREATE TABLE {schema}.finished (
    seq              bigint   NOT NULL,
    rank             bigint   NOT NULL,
    turn             bigint   NOT NULL,
    due              bigint   NOT NULL,
    visible          bigint   NOT NULL,
    created_at       bigint   NOT NULL,
    expires          bigint,
    token            bigint   NOT NULL,
    settled          bigint   NOT NULL,
    started_at       bigint   NOT NULL,
    crashes          integer  NOT NULL,
    status           smallint NOT NULL,
    cancel_requested boolean  NOT NULL,
    id               text     COLLATE "C" NOT NULL PRIMARY KEY,
    queue            text     COLLATE "C" NOT NULL,
    func_path        text     COLLATE "C" NOT NULL,
    rest             bytea    NOT NULL,
    body             bytea    NOT NULL,
    finished_at      bigint   NOT NULL,
    expires_at       bigint   NOT NULL,
    result           bytea    NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05);
COMMENT ON TABLE {schema}.finished IS 'omniq: tasks that have ended, until their result_ttl';

CREATE TABLE {schema}.dead (
    seq              bigint   NOT NULL,
    rank             bigint   NOT NULL,
    turn             bigint   NOT NULL,
    due              bigint   NOT NULL,
    visible          bigint   NOT NULL,
    created_at       bigint   NOT NULL,
    expires          bigint,
    token            bigint   NOT NULL,
    settled          bigint   NOT NULL,
    started_at       bigint   NOT NULL,
    crashes          integer  NOT NULL,
    status           smallint NOT NULL,
    cancel_requested boolean  NOT NULL,
    id               text     COLLATE "C" NOT NULL PRIMARY KEY,
    queue            text     COLLATE "C" NOT NULL,
    func_path        text     COLLATE "C" NOT NULL,
    rest             bytea    NOT NULL,
    body             bytea    NOT NULL,
    failed_at        bigint   NOT NULL,
    reason           text     COLLATE "C" NOT NULL,
    letter           bytea    NOT NULL
);
COMMENT ON TABLE {schema}.dead IS 'omniq: dead letters';

-- Everything else that is stored: checkpoints, states of gates, schedules, held unique keys, and so on.
-- `due` is an instant by which documents of a kind are found.
CREATE TABLE {schema}.documents (
    kind text COLLATE "C" NOT NULL,
    key  text COLLATE "C" NOT NULL,
    due  bigint,
    data bytea NOT NULL,
    PRIMARY KEY (kind, key)
) WITH (
    -- The state of a gate changes with every claim through it: room for that on the same page.
    fillfactor = 70,
    autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_scale_factor = 0.05
);
COMMENT ON TABLE {schema}.documents IS 'omniq: what belongs to tasks, queues and schedules';

-- A row as it is sent and returned. `version` changes with every change of the row.
CREATE TYPE {schema}.task AS (
    id text, seq bigint, queue text, func_path text, rank bigint, turn bigint, due bigint,
    visible bigint, created_at bigint, expires bigint, token bigint, settled bigint,
    started_at bigint, crashes integer, status smallint, cancel_requested boolean,
    attached boolean, owner text, parked text, rest bytea, body bytea, gates text[], version xid
);

-- A new task; all other columns have their first values.
CREATE TYPE {schema}.new_task AS (
    id text, body bytea, queue text, func_path text, rank bigint, turn bigint, due bigint,
    visible bigint, created_at bigint, rest bytea, expires bigint, gates text[]
);

-- The types below are many tasks: an array for each column. It has one element for each task, or a single
-- element that is the same for all tasks, or none if the value is NULL for all.

-- New tasks.
CREATE TYPE {schema}.gate_keys AS (keys text[]);
CREATE TYPE {schema}.new_tasks AS (
    ids text[], bodies bytea[], queues text[], func_paths text[], ranks bigint[], turns bigint[],
    dues bigint[], visibles bigint[], created_at bigint[], rests bytea[], expires bigint[],
    gates {schema}.gate_keys[]
);

-- Tasks that end: what changes in them (a rest that is NULL does not), their records unless `expires_at` is 0, and
-- their dead letters. `holders`: the owner that must still hold the task with the token, and no other may
-- have cancelled it or attached documents to it; '' for a task that is locked.
CREATE TYPE {schema}.endings AS (
    ids text[], results bytea[], holders text[], tokens bigint[], settled bigint[], crashes integer[],
    statuses smallint[], finished_at bigint[], expires_at bigint[], rests bytea[], letters bytea[],
    failed_at bigint[], reasons text[]
);

-- Rows as they were read.
CREATE TYPE {schema}.read_tasks AS (ids text[], versions xid[]);

-- Rows as they were read, and the gates under which they are parked from now on, or NULL.
CREATE TYPE {schema}.moved_tasks AS (ids text[], versions xid[], parked text[]);

-- Rows as an owner has claimed them.
CREATE TYPE {schema}.held_tasks AS (ids text[], tokens bigint[]);

-- Which waiting tasks are wanted: their queues (NULL: all), and their functions, as ranges of names without the
-- excluded ones.
CREATE TYPE {schema}.wanted_tasks AS (queues text[], lows text[], highs text[], excluded text[]);

-- A claim: the number of tasks, the time at which they are due (NULL: now), and a name that is written to the
-- claimed rows, so that a repeat finds them. `beat` is that of the owner's lease, as the owner knows it: a lower
-- one is another lease. `witness` and `token` are the id and the token of the owner's newest claim.
CREATE TYPE {schema}.claim AS (
    size int, due_by bigint, wanted {schema}.wanted_tasks, name text, beat bigint, witness text,
    token bigint
);

-- A change of a document; `after` NULL deletes it. `condition`: 0 the document must be `before`,
-- 1 no condition, 2 the change is left out unless the document is `before`.
CREATE TYPE {schema}.document_change AS (
    kind text, key text, before bytea, after bytea, due bigint, condition smallint
);

-- Fields of the rest, encoded as msgpack.
CREATE FUNCTION {schema}.packed(p_value bigint) RETURNS bytea LANGUAGE sql AS $$
    SELECT '\xd3'::bytea || int8send(p_value)
$$;
CREATE FUNCTION {schema}.packed(p_value text) RETURNS bytea LANGUAGE sql AS $$
    SELECT '\xda'::bytea || int2send(octet_length(convert_to(p_value, 'UTF8'))::smallint)
        || convert_to(p_value, 'UTF8')
$$;
CREATE FUNCTION {schema}.packed(p_value bytea) RETURNS bytea LANGUAGE sql AS $$
    SELECT '\xc6'::bytea || int4send(octet_length(p_value)) || p_value
$$;
CREATE FUNCTION {schema}.packed_rest(
    p_nonce text, p_attempts bigint, p_releases bigint, p_repeats boolean, p_unique text,
    p_ttl bigint, p_gates bytea, p_history bytea
) RETURNS bytea LANGUAGE sql AS $$
    SELECT set_byte('\x80'::bytea, 0, 128 + 5 + (p_unique IS NOT NULL)::int
            + (p_gates IS NOT NULL)::int + (p_history IS NOT NULL)::int)
        || {schema}.packed('nonce') || {schema}.packed(p_nonce)
        || {schema}.packed('attempts') || {schema}.packed(p_attempts)
        || {schema}.packed('releases') || {schema}.packed(p_releases)
        || {schema}.packed('repeats') || CASE WHEN p_repeats THEN '\xc3'::bytea ELSE '\xc2' END
        || {schema}.packed('result_ttl') || {schema}.packed(p_ttl)
        || coalesce({schema}.packed('unique') || {schema}.packed(p_unique), '')
        || coalesce({schema}.packed('gates') || p_gates, '')
        || coalesce({schema}.packed('history') || p_history, '')
$$;

INSERT INTO {schema}.live
SELECT seq, rank, due, due, visible, created_at, expires, token, settled, started_at, crashes,
    CASE place WHEN 5 THEN 0 ELSE place END, status, cancel_requested, attached, id, queue, func_path,
    owner, claim_id, parked, CASE WHEN gates IS NOT NULL THEN '{}'::text[] END,
    {schema}.packed_rest(nonce, attempts, releases, repeats, unique_key, result_ttl, gates, history),
    body
FROM {schema}.old_live;

INSERT INTO {schema}.finished
SELECT seq, rank, due, due, visible, created_at, expires, token, settled, started_at, crashes, status,
    cancel_requested, id, queue, func_path,
    {schema}.packed_rest(nonce, attempts, releases, repeats, unique_key, result_ttl, gates, history),
    body, finished_at, expires_at, result
FROM {schema}.old_finished;

INSERT INTO {schema}.dead
SELECT seq, rank, due, due, visible, created_at, expires, token, settled, started_at, crashes, status,
    cancel_requested, id, queue, func_path,
    {schema}.packed_rest(nonce, attempts, releases, repeats, unique_key, result_ttl, gates, history),
    body, last_failure, reason, letter
FROM {schema}.old_dead;

-- The store: its id, its epoch, its format, and the oldest format whose readers understand it. `due` is
-- the epoch again.
INSERT INTO {schema}.documents
SELECT 'store', 'store', 0::bigint, '\x97'::bytea || {schema}.packed(id::text) || '\x00010100a0a0'::bytea
FROM {schema}.store
UNION ALL
SELECT 'unique', unique_key, NULL, convert_to(id, 'UTF8')
FROM {schema}.old_live WHERE unique_key IS NOT NULL
UNION ALL
SELECT 'newest', id, NULL, result FROM {schema}.newest
UNION ALL
SELECT 'progress', id, NULL, report FROM {schema}.progress
UNION ALL
SELECT 'checkpoint', id, saved_at,
    '\x92'::bytea || {schema}.packed(saved_at) || {schema}.packed(checkpoint)
FROM {schema}.checkpoints
UNION ALL
SELECT 'schedule', id, NULL,
    '\x93'::bytea || {schema}.packed(version) || schedule || {schema}.packed(task)
FROM {schema}.schedules
UNION ALL
SELECT 'paused_queue', queue, NULL, '' FROM {schema}.paused
UNION ALL
-- A gate with parked tasks is checked by the next claim; its state gets the field `has_parked`. When the
-- others can be deleted, and when schedules are due, is decoded from them later (`upgrade.py`).
SELECT 'gate', key, CASE WHEN is_parked THEN 0 END,
    CASE WHEN is_parked
        THEN set_byte(state, 0, get_byte(state, 0) + 1) || {schema}.packed('has_parked') || '\xc3'::bytea
        ELSE state END
FROM (
    SELECT key, state, EXISTS (SELECT FROM {schema}.old_live WHERE parked = key) AS is_parked
    FROM {schema}.gates
) AS gate;

-- Parked under a gate whose state was never stored.
INSERT INTO {schema}.documents
SELECT DISTINCT 'gate', parked, 0, '\x81'::bytea || {schema}.packed('has_parked') || '\xc3'::bytea
FROM {schema}.old_live WHERE parked IS NOT NULL
ON CONFLICT DO NOTHING;

DROP TABLE {schema}.old_live, {schema}.old_finished, {schema}.old_dead, {schema}.newest,
    {schema}.progress, {schema}.checkpoints, {schema}.schedules, {schema}.paused, {schema}.gates,
    {schema}.store;
DROP FUNCTION {schema}.packed_rest(text, bigint, bigint, boolean, text, bigint, bytea, bytea),
    {schema}.packed(bigint), {schema}.packed(text), {schema}.packed(bytea);

-- The order of claims, of each function in each queue. What a claim does not ask for is not read.
CREATE INDEX live_ready ON {schema}.live (place, func_path, queue, rank, turn, seq) WHERE place < 2;
CREATE INDEX live_delayed ON {schema}.live (visible) WHERE place = 2;
CREATE INDEX live_parked ON {schema}.live (parked, queue, func_path, (crashes > 0), rank, turn, seq)
    WHERE place = 3;
CREATE INDEX live_held ON {schema}.live (owner) WHERE place = 4;
-- Without `place`, so that a search for the suspects of an owner cannot use the index of all that it holds.
CREATE INDEX live_held_suspects ON {schema}.live (owner) WHERE crashes > 0;
-- For scans by a rare status: a task that succeeds at its first run has no entry in them.
CREATE INDEX live_retrying ON {schema}.live (id) WHERE status = 2;
CREATE INDEX finished_badly ON {schema}.finished (status, id) WHERE status <> 3;
-- For the purge; also covers the count by status.
CREATE INDEX finished_expiry ON {schema}.finished (expires_at, status);
CREATE INDEX dead_failed_at ON {schema}.dead (failed_at);
CREATE INDEX documents_due ON {schema}.documents (kind, due) WHERE due IS NOT NULL;

-- `length` is the length of the lease in microseconds, `beat` counts the renewals, and `epoch` is that of
-- the store at the last one.
ALTER TABLE {schema}.leases
    ADD COLUMN length bigint NOT NULL DEFAULT 0,
    ADD COLUMN epoch bigint NOT NULL DEFAULT 0,
    ADD COLUMN beat bigint NOT NULL DEFAULT 0;
