-- The tables of an SQLite store, version 2. Times are microseconds since 1970.
--
-- A task has one row in omniq_tasks, which does not change, as long as any other row of it is
-- stored. Its state is in omniq_live until it ends, then in omniq_finished until its result_ttl has
-- passed. A dead letter also has a row in omniq_dead. All four share `seq`, the order of enqueue.

CREATE TABLE omniq_tasks (
    seq        INTEGER PRIMARY KEY,
    id         TEXT    NOT NULL UNIQUE,
    nonce      TEXT    NOT NULL,
    queue      TEXT    NOT NULL,
    priority   INTEGER NOT NULL,
    func_path  TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    repeats    INTEGER NOT NULL,
    unique_key TEXT,
    expires    INTEGER,
    result_ttl INTEGER NOT NULL,
    gates      BLOB,
    body       BLOB    NOT NULL
);

-- `place` shows how a claim finds the task: 0 ready, 1 ready and a suspect, 2 not due yet, 3 parked
-- under a gate, 4 held by `owner`. `lot` is the group of parked tasks that the task belongs to:
-- "suspect/queue/gate", where suspect is 0 or 1. `attached` is 1 when a checkpoint, progress or newest
-- result may have to be deleted when the task ends. The defaults are those of a new task.
CREATE TABLE omniq_live (
    seq              INTEGER PRIMARY KEY,
    place            INTEGER NOT NULL,
    queue            TEXT    NOT NULL,
    priority         INTEGER NOT NULL,
    unique_key       TEXT,
    due              INTEGER NOT NULL,
    visible          INTEGER NOT NULL,
    status           TEXT    NOT NULL DEFAULT 'pending',
    attempts         INTEGER NOT NULL DEFAULT 0,
    crashes          INTEGER NOT NULL DEFAULT 0,
    releases         INTEGER NOT NULL DEFAULT 0,
    token            INTEGER NOT NULL DEFAULT 0,
    settled          INTEGER NOT NULL DEFAULT 0,
    owner            TEXT,
    started_at       INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    parked           TEXT,
    lot              TEXT,
    attached         INTEGER NOT NULL DEFAULT 0,
    history          BLOB
);

-- One small index for each place, so that a claim never reads tasks of other places.
CREATE INDEX omniq_ready ON omniq_live (queue, priority DESC, due) WHERE place = 0;
CREATE INDEX omniq_suspects ON omniq_live (queue, priority DESC, due) WHERE place = 1;
CREATE INDEX omniq_delayed ON omniq_live (visible) WHERE place = 2;
CREATE INDEX omniq_parked ON omniq_live (lot, priority DESC, due) WHERE place = 3;
CREATE INDEX omniq_held ON omniq_live (owner) WHERE place = 4;
CREATE INDEX omniq_held_suspects ON omniq_live (owner) WHERE place = 4 AND crashes > 0;
-- For readers, which search for the few tasks that have failed among very many others.
CREATE INDEX omniq_retrying ON omniq_live (seq) WHERE status = 'retrying';
CREATE UNIQUE INDEX omniq_unique ON omniq_live (unique_key) WHERE unique_key IS NOT NULL;

CREATE TABLE omniq_finished (
    seq              INTEGER PRIMARY KEY,
    due              INTEGER NOT NULL,
    visible          INTEGER NOT NULL,
    status           TEXT    NOT NULL,
    attempts         INTEGER NOT NULL,
    crashes          INTEGER NOT NULL,
    releases         INTEGER NOT NULL,
    token            INTEGER NOT NULL,
    settled          INTEGER NOT NULL,
    started_at       INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL,
    history          BLOB,
    finished_at      INTEGER NOT NULL,
    expires_at       INTEGER NOT NULL,
    result           BLOB    NOT NULL
);

-- Serves the purge, and covers the count by status.
CREATE INDEX omniq_finished_expiry ON omniq_finished (expires_at, status);

-- For readers, too. Successful tasks are not in this index.
CREATE INDEX omniq_ended_badly ON omniq_finished (status, seq) WHERE status <> 'success';

CREATE TABLE omniq_dead (
    seq              INTEGER PRIMARY KEY,
    id               TEXT    NOT NULL UNIQUE,
    due              INTEGER NOT NULL,
    visible          INTEGER NOT NULL,
    status           TEXT    NOT NULL,
    attempts         INTEGER NOT NULL,
    crashes          INTEGER NOT NULL,
    releases         INTEGER NOT NULL,
    token            INTEGER NOT NULL,
    settled          INTEGER NOT NULL,
    started_at       INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL,
    history          BLOB,
    last_failure     INTEGER NOT NULL,
    reason           TEXT    NOT NULL,
    letter           BLOB    NOT NULL
);

-- The newest result of a task that repeats.
CREATE TABLE omniq_newest (seq INTEGER PRIMARY KEY, result BLOB NOT NULL);

CREATE TABLE omniq_progress (seq INTEGER PRIMARY KEY, report BLOB NOT NULL);

CREATE TABLE omniq_checkpoints (
    id         TEXT PRIMARY KEY,
    saved_at   INTEGER NOT NULL,
    checkpoint BLOB    NOT NULL
) WITHOUT ROWID;

-- `schedule` is the schedule without its task's arguments; `task` is the task, encoded by the
-- serializer.
CREATE TABLE omniq_schedules (
    id       TEXT PRIMARY KEY,
    version  INTEGER NOT NULL,
    schedule BLOB    NOT NULL,
    task     BLOB    NOT NULL
) WITHOUT ROWID;

CREATE TABLE omniq_paused (queue TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE omniq_gates (key TEXT PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID;

-- Owners that are fenced and may not claim. The leases themselves are in a separate database.
CREATE TABLE omniq_fences (owner TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID
