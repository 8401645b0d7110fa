-- The tables of a PostgreSQL store, version 1. Times are microseconds since 1970.
-- {schema}  the store's schema
--
-- A task is in `live` until it ends, then in `finished` until its result_ttl. A dead letter is in
-- `dead` besides, with all that a retry needs. An id is in `live` or in the other two, never both.

-- The order of enqueue.
CREATE SEQUENCE {schema}.seq;

-- `place` says where a claim looks for the task: 0 ready, 1 ready and a suspect, 2 not due yet,
-- 3 parked under a gate, 4 held by `owner`, 5 ready and with gates to pass.
-- `rank` is the bitwise complement of the priority: what comes first has the lowest.
-- `status`: 0 pending, 1 running, 2 retrying, 3 success, 4 failed, 5 cancelled.
-- `lot` is where parked tasks wait together: "suspect/queue/gate", suspect being 0 or 1.
-- `attached` is set when a checkpoint, progress or newest result may have to go with the task.
--
-- Every task is rewritten at its claim and deleted at its end. Vacuum comes early and does not
-- rest in between, or claims would walk over what is gone.
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

-- One small index for each kind of place, so that a claim never walks over what it cannot take.
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

-- Serves the purge, and covers the count by status.
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

-- `schedule` is the schedule without its task; `task` is that, as the serializer encodes it.
CREATE TABLE {schema}.schedules (
    id       text COLLATE "C" PRIMARY KEY,
    version  bigint NOT NULL,
    schedule bytea  NOT NULL,
    task     bytea  NOT NULL
);

CREATE TABLE {schema}.paused (queue text COLLATE "C" PRIMARY KEY);

-- `wake_at` repeats what is in `state`, for claims that only ask whether a gate may have room.
CREATE TABLE {schema}.gates (
    key     text COLLATE "C" PRIMARY KEY,
    wake_at bigint NOT NULL,
    state   bytea  NOT NULL
);

-- `until` counts by the server's clock, or by the one the storages were given. A fenced owner stays
-- for a day, so that it can neither renew nor claim; `at` says when it was last written.
CREATE TABLE {schema}.leases (
    owner  text COLLATE "C" PRIMARY KEY,
    until  bigint  NOT NULL,
    fenced boolean NOT NULL,
    at     bigint  NOT NULL,
    info   bytea
) WITH (fillfactor = 50);

-- Tells this store from another one under the same name in another database.
CREATE TABLE {schema}.store (id uuid NOT NULL);
INSERT INTO {schema}.store VALUES (gen_random_uuid());
