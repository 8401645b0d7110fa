-- The tables of an SQLite store, version 3. Times are microseconds since 1970.
--
-- A task has one row in omniq_tasks, which does not change, as long as any other row of it is
-- stored. Its state is in omniq_live until it ends, then in omniq_finished until its result_ttl has
-- passed. A dead letter also has a row in omniq_dead. All four share `seq`, the order of enqueue.
-- A task was stored `stored_after` microseconds after its `created_at`. `gates` are its limits; `rest`
-- has all fields of a task that no column has: see tables.py. '' and 0 are for "unique", expires, gates
-- and rest what NULL is elsewhere.
--
-- Types and ranges are checked, so that a value which omniq never writes cannot stop the claims and pages
-- that would read it.
--
-- An upgrade from an earlier version runs this file too, and has omniq_tasks and omniq_fences already.

CREATE TABLE IF NOT EXISTS omniq_tasks (
    seq          INTEGER PRIMARY KEY CHECK (seq BETWEEN 1 AND 4611686018427387904),
    id           TEXT    NOT NULL UNIQUE,
    nonce        TEXT    NOT NULL,
    queue        TEXT    NOT NULL,
    priority     INTEGER NOT NULL,
    func_path    TEXT    NOT NULL,
    created_at   INTEGER NOT NULL,
    repeats      INTEGER NOT NULL,
    "unique"     TEXT,
    expires      INTEGER,
    result_ttl   INTEGER NOT NULL,
    gates        BLOB,
    body         BLOB    NOT NULL,
    stored_after INTEGER NOT NULL DEFAULT 0
) STRICT;

-- The functions of all tasks, with a short number for the order in which tasks are claimed.
CREATE TABLE omniq_functions (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE) STRICT;

-- `place` shows how a claim finds the task: 0 ready, 1 ready and a suspect, 2 not due yet, 3 parked
-- under the gate `parked`, 4 held by `owner`. `func` is the function's number. `rank` is the inverted
-- priority (~), so that all of the claim order ascends: (rank, turn, seq). The task is due
-- `due_after` microseconds after `turn`. `lot` is the group of parked tasks that the task belongs to:
-- "func/suspect/queue", where suspect is 0 or 1. `attached` is 1 when a checkpoint, progress or newest
-- result may have to be deleted when the task ends. The defaults are those of a new task.
CREATE TABLE omniq_live (
    seq              INTEGER PRIMARY KEY CHECK (seq BETWEEN 1 AND 4611686018427387904),
    place            INTEGER NOT NULL,
    queue            TEXT    NOT NULL,
    func             INTEGER NOT NULL,
    rank             INTEGER NOT NULL,
    turn             INTEGER NOT NULL CHECK (abs(turn) < 1000000000000000000),
    due_after        INTEGER NOT NULL DEFAULT 0 CHECK (abs(due_after) < 1000000000000000000),
    visible          INTEGER NOT NULL,
    status           TEXT    NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'retrying')),
    attempts         INTEGER NOT NULL DEFAULT 0,
    crashes          INTEGER NOT NULL DEFAULT 0,
    token            INTEGER NOT NULL DEFAULT 0 CHECK (token < 4611686018427387904),
    settled          INTEGER NOT NULL DEFAULT 0,
    owner            TEXT,
    started_at       INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    attached         INTEGER NOT NULL DEFAULT 0,
    parked           TEXT,
    lot              TEXT,
    rest             BLOB
) STRICT;

-- Small indexes for each place, so that a claim never reads tasks of other places, nor of functions
-- that it does not ask for. Claims from named queues use omniq_ready_by_queue, which the first of them
-- creates: a store without them need not maintain it.
CREATE INDEX omniq_ready ON omniq_live (place, func, rank, turn) WHERE place <= 1;
CREATE INDEX omniq_delayed ON omniq_live (visible) WHERE place = 2;
CREATE INDEX omniq_parked ON omniq_live (place, parked, lot, rank, turn) WHERE place = 3;
CREATE INDEX omniq_held ON omniq_live (owner) WHERE place = 4;
CREATE INDEX omniq_held_suspects ON omniq_live (owner) WHERE place = 4 AND crashes > 0;
-- For readers, which search for the few tasks that have failed among very many others.
CREATE INDEX omniq_retrying ON omniq_live (seq) WHERE status = 'retrying';

-- In order of expiry, and so of the ends: tasks that end together are stored side by side, however far
-- apart they were enqueued.
CREATE TABLE omniq_finished (
    seq              INTEGER NOT NULL,
    due              INTEGER NOT NULL,
    status           TEXT    NOT NULL CHECK (status IN ('success', 'failed', 'cancelled')),
    attempts         INTEGER NOT NULL,
    crashes          INTEGER NOT NULL,
    token            INTEGER NOT NULL,
    settled          INTEGER NOT NULL,
    started_at       INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL,
    rest             BLOB,
    finished_at      INTEGER NOT NULL,
    expires_at       INTEGER NOT NULL,
    result           BLOB    NOT NULL,
    PRIMARY KEY (expires_at, seq)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX omniq_finished_seq ON omniq_finished (seq);

-- For readers, too. Successful tasks are not in this index.
CREATE INDEX omniq_ended_badly ON omniq_finished (status, seq) WHERE status <> 'success';

CREATE TABLE omniq_dead (
    seq              INTEGER PRIMARY KEY,
    id               TEXT    NOT NULL UNIQUE,
    due              INTEGER NOT NULL,
    status           TEXT    NOT NULL CHECK (status IN ('success', 'failed', 'cancelled')),
    attempts         INTEGER NOT NULL,
    crashes          INTEGER NOT NULL,
    token            INTEGER NOT NULL,
    settled          INTEGER NOT NULL,
    started_at       INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL,
    rest             BLOB,
    last_failure     INTEGER NOT NULL,
    reason           TEXT    NOT NULL,
    letter           BLOB    NOT NULL
) STRICT;

CREATE INDEX omniq_dead_failure ON omniq_dead (last_failure, id);

-- Checkpoints, progress, newest results, held unique keys, gates, schedules, paused queues, and facts
-- about the store itself. `due` is an instant by which documents of a kind are found.
CREATE TABLE omniq_documents (
    kind TEXT NOT NULL,
    key  TEXT NOT NULL,
    data BLOB NOT NULL,
    due  INTEGER,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX omniq_documents_due ON omniq_documents (kind, due) WHERE due IS NOT NULL;

-- Owners that are fenced and may not claim. The leases themselves are in a separate database.
CREATE TABLE IF NOT EXISTS omniq_fences (
    owner TEXT PRIMARY KEY,
    at    INTEGER NOT NULL
) STRICT, WITHOUT ROWID
