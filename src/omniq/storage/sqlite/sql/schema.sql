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
-- that would read it. Only integers are equal to `value | 0`; every text is less than the blob x'', and
-- every blob is not. These comparisons cost a third of typeof(), and STRICT tables need SQLite 3.37.
-- No list in a CHECK has more than two values: SQLite searches a table of a longer one for each row, and the
-- UPDATE of a claim would take 1.6 times as long.
--
-- An upgrade from an earlier version runs this file too, and has omniq_tasks and omniq_fences already.

CREATE TABLE IF NOT EXISTS omniq_tasks (
    seq          INTEGER PRIMARY KEY CHECK (seq BETWEEN 1 AND 4611686018427387904),
    id           TEXT    NOT NULL UNIQUE CHECK (id < x''),
    nonce        TEXT    NOT NULL CHECK (nonce < x''),
    queue        TEXT    NOT NULL CHECK (queue < x''),
    priority     INTEGER NOT NULL CHECK (priority = priority | 0),
    func_path    TEXT    NOT NULL CHECK (func_path < x''),
    created_at   INTEGER NOT NULL CHECK (created_at = created_at | 0),
    repeats      INTEGER NOT NULL CHECK (repeats IN (0, 1)),
    "unique"     TEXT CHECK ("unique" < x''),
    expires      INTEGER CHECK (expires = expires | 0),
    result_ttl   INTEGER NOT NULL CHECK (result_ttl = result_ttl | 0),
    gates        BLOB CHECK (gates >= x''),
    body         BLOB    NOT NULL CHECK (body >= x''),
    stored_after INTEGER NOT NULL DEFAULT 0 CHECK (stored_after = stored_after | 0)
);

-- The functions of all tasks, with a short number for the order in which tasks are claimed.
CREATE TABLE omniq_functions (
    id   INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE CHECK (path < x'')
);

-- `place` shows how a claim finds the task: 0 ready, 1 ready and a suspect, 2 not due yet, 3 parked
-- under the gate `parked`, 4 held by `owner`. `func` is the function's number. `rank` is the inverted
-- priority (~), so that all of the claim order ascends: (rank, turn, seq). The task is due
-- `due_after` microseconds after `turn`. `lot` is the group of parked tasks that the task belongs to:
-- "func/suspect/queue", where suspect is 0 or 1. `attached` is 1 when a checkpoint, progress or newest
-- result may have to be deleted when the task ends. The defaults are those of a new task.
CREATE TABLE omniq_live (
    seq              INTEGER PRIMARY KEY CHECK (seq BETWEEN 1 AND 4611686018427387904),
    place            INTEGER NOT NULL CHECK (place = place | 0 AND place BETWEEN 0 AND 4),
    queue            TEXT    NOT NULL CHECK (queue < x''),
    func             INTEGER NOT NULL CHECK (func = func | 0),
    rank             INTEGER NOT NULL CHECK (rank = rank | 0),
    turn             INTEGER NOT NULL
        CHECK (turn = turn | 0 AND turn BETWEEN -999999999999999999 AND 999999999999999999),
    due_after        INTEGER NOT NULL DEFAULT 0
        CHECK (due_after = due_after | 0 AND due_after BETWEEN -999999999999999999 AND 999999999999999999),
    visible          INTEGER NOT NULL CHECK (visible = visible | 0),
    status           TEXT    NOT NULL DEFAULT 'pending'
        CHECK (status = 'pending' OR status IN ('running', 'retrying')),
    attempts         INTEGER NOT NULL DEFAULT 0 CHECK (attempts = attempts | 0),
    crashes          INTEGER NOT NULL DEFAULT 0 CHECK (crashes = crashes | 0),
    token            INTEGER NOT NULL DEFAULT 0 CHECK (token = token | 0 AND token < 4611686018427387904),
    settled          INTEGER NOT NULL DEFAULT 0 CHECK (settled = settled | 0),
    owner            TEXT CHECK (owner < x''),
    started_at       INTEGER NOT NULL DEFAULT 0 CHECK (started_at = started_at | 0),
    cancel_requested INTEGER NOT NULL DEFAULT 0 CHECK (cancel_requested IN (0, 1)),
    attached         INTEGER NOT NULL DEFAULT 0 CHECK (attached IN (0, 1)),
    parked           TEXT CHECK (parked < x''),
    lot              TEXT CHECK (lot < x''),
    rest             BLOB CHECK (rest >= x'')
);

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
    seq              INTEGER NOT NULL CHECK (seq = seq | 0),
    due              INTEGER NOT NULL CHECK (due = due | 0),
    status           TEXT    NOT NULL CHECK (status = 'success' OR status IN ('failed', 'cancelled')),
    attempts         INTEGER NOT NULL CHECK (attempts = attempts | 0),
    crashes          INTEGER NOT NULL CHECK (crashes = crashes | 0),
    token            INTEGER NOT NULL CHECK (token = token | 0),
    settled          INTEGER NOT NULL CHECK (settled = settled | 0),
    started_at       INTEGER NOT NULL CHECK (started_at = started_at | 0),
    cancel_requested INTEGER NOT NULL CHECK (cancel_requested IN (0, 1)),
    rest             BLOB CHECK (rest >= x''),
    finished_at      INTEGER NOT NULL CHECK (finished_at = finished_at | 0),
    expires_at       INTEGER NOT NULL CHECK (expires_at = expires_at | 0),
    result           BLOB    NOT NULL CHECK (result >= x''),
    PRIMARY KEY (expires_at, seq)
) WITHOUT ROWID;

CREATE UNIQUE INDEX omniq_finished_seq ON omniq_finished (seq);

-- For readers, too. Successful tasks are not in this index.
CREATE INDEX omniq_ended_badly ON omniq_finished (status, seq) WHERE status <> 'success';

CREATE TABLE omniq_dead (
    seq              INTEGER PRIMARY KEY,
    id               TEXT    NOT NULL UNIQUE CHECK (id < x''),
    due              INTEGER NOT NULL CHECK (due = due | 0),
    status           TEXT    NOT NULL CHECK (status = 'success' OR status IN ('failed', 'cancelled')),
    attempts         INTEGER NOT NULL CHECK (attempts = attempts | 0),
    crashes          INTEGER NOT NULL CHECK (crashes = crashes | 0),
    token            INTEGER NOT NULL CHECK (token = token | 0),
    settled          INTEGER NOT NULL CHECK (settled = settled | 0),
    started_at       INTEGER NOT NULL CHECK (started_at = started_at | 0),
    cancel_requested INTEGER NOT NULL CHECK (cancel_requested IN (0, 1)),
    rest             BLOB CHECK (rest >= x''),
    last_failure     INTEGER NOT NULL CHECK (last_failure = last_failure | 0),
    reason           TEXT    NOT NULL CHECK (reason < x''),
    letter           BLOB    NOT NULL CHECK (letter >= x'')
);

CREATE INDEX omniq_dead_failure ON omniq_dead (last_failure, id);

-- Checkpoints, progress, newest results, held unique keys, gates, schedules, paused queues, and facts
-- about the store itself. `due` is an instant by which documents of a kind are found.
CREATE TABLE omniq_documents (
    kind TEXT NOT NULL CHECK (kind < x''),
    key  TEXT NOT NULL CHECK (key < x''),
    data BLOB NOT NULL CHECK (data >= x''),
    due  INTEGER CHECK (due = due | 0),
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;

CREATE INDEX omniq_documents_due ON omniq_documents (kind, due) WHERE due IS NOT NULL;

-- Owners that are fenced and may not claim. The leases themselves are in a separate database.
CREATE TABLE IF NOT EXISTS omniq_fences (
    owner TEXT PRIMARY KEY CHECK (owner < x''),
    at    INTEGER NOT NULL CHECK (at = at | 0)
) WITHOUT ROWID
