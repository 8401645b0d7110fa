-- The tables of a PostgreSQL store, version 1. Times are microseconds since 1970.
-- {schema}  the store's schema
--
-- A task is in `live` until it ends, then in `finished` until its result_ttl has passed. A dead letter
-- is also in `dead`, with everything that a retry needs. An id is in `live` or in the other two, never
-- in both.

-- Numbers the tasks in the order of enqueue.
CREATE SEQUENCE {schema}.seq;

-- `place` is the state that claims search by: 0 ready, 1 ready and a suspect (it has crashed a worker),
-- 2 not due yet, 3 parked under a gate, 4 held by `owner`, 5 ready and with gates to pass.
-- `rank` is the bitwise complement of the priority: the lowest rank is claimed first.
-- `status`: 0 pending, 1 running, 2 retrying, 3 success, 4 failed, 5 cancelled.
-- `lot` groups parked tasks: "suspect/queue/gate", suspect being 0 or 1.
-- `attached` is set when the task may have a checkpoint, progress or newest result, which must be
-- deleted with it.
--
-- Every task is updated at its claim and deleted at its end. Autovacuum starts early and runs without
-- a cost delay; otherwise claims would have to skip many dead index entries.
CREATE TABLE {schema}.live (
    seq              bigint   NOT NULL DEFAULT nextval('{schema}.seq'),
    rank             bigint   NOT NULL,
    due              bigint   NOT NULL,
    visible          bigint   NOT NULL,
    created_at       bigint   NOT NULL,
    attempts         bigint   NOT NULL,
    token            bigint   NOT NULL DEFAULT 0,
    settled          bigint   NOT NULL DEFAULT 0,
    started_at       bigint   NOT NULL DEFAULT 0,
    result_ttl       bigint   NOT NULL,
    expires          bigint,
    crashes          integer  NOT NULL DEFAULT 0,
    releases         integer  NOT NULL DEFAULT 0,
    place            smallint NOT NULL,
    status           smallint NOT NULL DEFAULT 0,
    cancel_requested boolean  NOT NULL DEFAULT false,
    repeats          boolean  NOT NULL,
    attached         boolean  NOT NULL DEFAULT false,
    id               text     COLLATE "C" NOT NULL PRIMARY KEY,
    nonce            text     COLLATE "C" NOT NULL,
    queue            text     COLLATE "C" NOT NULL,
    func_path        text     COLLATE "C" NOT NULL,
    owner            text     COLLATE "C",
    claim_id         text     COLLATE "C",
    unique_key       text     COLLATE "C",
    parked           text     COLLATE "C",
    lot              text     COLLATE "C",
    gates            bytea,
    history          bytea,
    body             bytea    NOT NULL
) WITH (
    fillfactor = 90,
    autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_threshold = 5000, autovacuum_analyze_scale_factor = 0.05
);

-- One small partial index for each kind of place, so that a claim never reads tasks it cannot take.
CREATE INDEX live_ready ON {schema}.live (place, queue, rank, due, seq) WHERE place IN (0, 1, 5);
CREATE INDEX live_delayed ON {schema}.live (visible) WHERE place = 2;
CREATE INDEX live_parked ON {schema}.live (lot, rank, due, seq) WHERE place = 3;
CREATE INDEX live_held ON {schema}.live (owner) WHERE place = 4;
CREATE INDEX live_held_suspects ON {schema}.live (owner) WHERE place = 4 AND crashes > 0;
CREATE UNIQUE INDEX live_unique ON {schema}.live (unique_key) WHERE unique_key IS NOT NULL;

CREATE TABLE {schema}.finished (
    seq              bigint   NOT NULL,
    rank             bigint   NOT NULL,
    due              bigint   NOT NULL,
    visible          bigint   NOT NULL,
    created_at       bigint   NOT NULL,
    attempts         bigint   NOT NULL,
    token            bigint   NOT NULL,
    settled          bigint   NOT NULL,
    started_at       bigint   NOT NULL,
    result_ttl       bigint   NOT NULL,
    expires          bigint,
    crashes          integer  NOT NULL,
    releases         integer  NOT NULL,
    status           smallint NOT NULL,
    cancel_requested boolean  NOT NULL,
    repeats          boolean  NOT NULL,
    id               text     COLLATE "C" NOT NULL PRIMARY KEY,
    nonce            text     COLLATE "C" NOT NULL,
    queue            text     COLLATE "C" NOT NULL,
    func_path        text     COLLATE "C" NOT NULL,
    unique_key       text     COLLATE "C",
    gates            bytea,
    history          bytea,
    body             bytea    NOT NULL,
    finished_at      bigint   NOT NULL,
    expires_at       bigint   NOT NULL,
    result           bytea    NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05);

-- For the purge; also covers the count by status.
CREATE INDEX finished_expiry ON {schema}.finished (expires_at, status);

CREATE TABLE {schema}.dead (
    seq              bigint   NOT NULL,
    rank             bigint   NOT NULL,
    due              bigint   NOT NULL,
    visible          bigint   NOT NULL,
    created_at       bigint   NOT NULL,
    attempts         bigint   NOT NULL,
    token            bigint   NOT NULL,
    settled          bigint   NOT NULL,
    started_at       bigint   NOT NULL,
    result_ttl       bigint   NOT NULL,
    expires          bigint,
    crashes          integer  NOT NULL,
    releases         integer  NOT NULL,
    status           smallint NOT NULL,
    cancel_requested boolean  NOT NULL,
    repeats          boolean  NOT NULL,
    id               text     COLLATE "C" NOT NULL PRIMARY KEY,
    nonce            text     COLLATE "C" NOT NULL,
    queue            text     COLLATE "C" NOT NULL,
    func_path        text     COLLATE "C" NOT NULL,
    unique_key       text     COLLATE "C",
    gates            bytea,
    history          bytea,
    body             bytea    NOT NULL,
    last_failure     bigint   NOT NULL,
    reason           text     COLLATE "C" NOT NULL,
    letter           bytea    NOT NULL
);

-- The newest result of a task that repeats.
CREATE TABLE {schema}.newest (id text COLLATE "C" PRIMARY KEY, result bytea NOT NULL);

CREATE TABLE {schema}.progress (id text COLLATE "C" PRIMARY KEY, report bytea NOT NULL);

CREATE TABLE {schema}.checkpoints (
    id         text COLLATE "C" PRIMARY KEY,
    saved_at   bigint NOT NULL,
    checkpoint bytea  NOT NULL
);

-- `schedule` is the schedule without its task; `task` is the task as the serializer encodes it.
CREATE TABLE {schema}.schedules (
    id       text COLLATE "C" PRIMARY KEY,
    version  bigint NOT NULL,
    schedule bytea  NOT NULL,
    task     bytea  NOT NULL
);

CREATE TABLE {schema}.paused (queue text COLLATE "C" PRIMARY KEY);

-- `wake_at` is a copy of the field in `state`, for claims that only check whether a gate may have room.
CREATE TABLE {schema}.gates (
    key     text COLLATE "C" PRIMARY KEY,
    wake_at bigint NOT NULL,
    state   bytea  NOT NULL
);

-- `until` is on the server's clock, or on the clock that the storages were given. The row of a fenced
-- owner is retained for a day, so that it can neither renew nor claim; `at` is the time of the last write.
CREATE TABLE {schema}.leases (
    owner  text COLLATE "C" PRIMARY KEY,
    until  bigint  NOT NULL,
    fenced boolean NOT NULL,
    at     bigint  NOT NULL,
    info   bytea
) WITH (fillfactor = 50);

-- Identifies this store: a schema of the same name in another database has a different id.
CREATE TABLE {schema}.store (id uuid NOT NULL);
INSERT INTO {schema}.store VALUES (gen_random_uuid());
