-- Upgrades an SQLite store from version 2 to version 3: see schema.sql. The functions are in
-- upgrade.py. The bodies of tasks, which are most of the data, stay where they are; the column
-- omniq_tasks.gates is not used any more.
ALTER TABLE omniq_tasks RENAME COLUMN unique_key TO "unique";
ALTER TABLE omniq_tasks ADD COLUMN stored_at INTEGER NOT NULL DEFAULT 0;

ALTER TABLE omniq_live RENAME TO omniq_old_live;
ALTER TABLE omniq_finished RENAME TO omniq_old_finished;
ALTER TABLE omniq_dead RENAME TO omniq_old_dead;
DROP INDEX omniq_ready;
DROP INDEX omniq_suspects;
DROP INDEX omniq_delayed;
DROP INDEX omniq_parked;
DROP INDEX omniq_held;
DROP INDEX omniq_held_suspects;
DROP INDEX omniq_retrying;
DROP INDEX omniq_unique;
DROP INDEX omniq_finished_expiry;
DROP INDEX omniq_ended_badly;

CREATE TABLE omniq_live (
    seq              INTEGER PRIMARY KEY,
    place            INTEGER NOT NULL,
    queue            TEXT    NOT NULL,
    func_path        TEXT    NOT NULL,
    rank             INTEGER NOT NULL,
    turn             INTEGER NOT NULL,
    due              INTEGER NOT NULL,
    visible          INTEGER NOT NULL,
    status           TEXT    NOT NULL DEFAULT 'pending',
    attempts         INTEGER NOT NULL DEFAULT 0,
    crashes          INTEGER NOT NULL DEFAULT 0,
    token            INTEGER NOT NULL DEFAULT 0,
    settled          INTEGER NOT NULL DEFAULT 0,
    owner            TEXT,
    started_at       INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    attached         INTEGER NOT NULL DEFAULT 0,
    parked           TEXT,
    lot              TEXT,
    rest             BLOB
);

CREATE INDEX omniq_ready ON omniq_live (place, func_path, rank, turn) WHERE place <= 1;

CREATE INDEX omniq_delayed ON omniq_live (visible) WHERE place = 2;

CREATE INDEX omniq_parked ON omniq_live (parked, lot, rank, turn) WHERE place = 3;

CREATE INDEX omniq_held ON omniq_live (owner) WHERE place = 4;

CREATE INDEX omniq_held_suspects ON omniq_live (owner) WHERE place = 4 AND crashes > 0;

CREATE INDEX omniq_retrying ON omniq_live (seq) WHERE status = 'retrying';

CREATE TABLE omniq_finished (
    seq              INTEGER PRIMARY KEY,
    due              INTEGER NOT NULL,
    status           TEXT    NOT NULL,
    attempts         INTEGER NOT NULL,
    crashes          INTEGER NOT NULL,
    token            INTEGER NOT NULL,
    settled          INTEGER NOT NULL,
    started_at       INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL,
    rest             BLOB,
    finished_at      INTEGER NOT NULL,
    expires_at       INTEGER NOT NULL,
    result           BLOB    NOT NULL
);

CREATE INDEX omniq_finished_expiry ON omniq_finished (expires_at, status);

CREATE INDEX omniq_ended_badly ON omniq_finished (status, seq) WHERE status <> 'success';

CREATE TABLE omniq_dead (
    seq              INTEGER PRIMARY KEY,
    id               TEXT    NOT NULL UNIQUE,
    due              INTEGER NOT NULL,
    status           TEXT    NOT NULL,
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
);

CREATE INDEX omniq_dead_failure ON omniq_dead (last_failure, id);

CREATE TABLE omniq_documents (
    kind TEXT NOT NULL,
    key  TEXT NOT NULL,
    data BLOB NOT NULL,
    due  INTEGER,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;

CREATE INDEX omniq_documents_due ON omniq_documents (kind, due) WHERE due IS NOT NULL;

-- What was parked is ready again: the next claims park it under its gates anew.
INSERT INTO omniq_live
SELECT old.seq, CASE old.place WHEN 3 THEN old.crashes > 0 ELSE old.place END, old.queue,
    tasks.func_path, ~old.priority, old.due, old.due, old.visible, old.status, old.attempts,
    old.crashes, old.token, old.settled, old.owner, old.started_at, old.cancel_requested,
    old.attached, NULL, NULL, omniq_rest(tasks.gates, old.history, old.releases)
FROM omniq_old_live AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT INTO omniq_finished
SELECT old.seq, old.due, old.status, old.attempts, old.crashes, old.token, old.settled,
    old.started_at, old.cancel_requested, omniq_rest(tasks.gates, old.history, old.releases),
    old.finished_at, old.expires_at, old.result
FROM omniq_old_finished AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT INTO omniq_dead
SELECT old.seq, old.id, old.due, old.status, old.attempts, old.crashes, old.token, old.settled,
    old.started_at, old.cancel_requested, omniq_rest(tasks.gates, old.history, old.releases),
    old.last_failure, old.reason, old.letter
FROM omniq_old_dead AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT INTO omniq_documents
SELECT 'unique', old.unique_key, CAST(tasks.id AS BLOB), NULL
FROM omniq_old_live AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq
WHERE old.unique_key IS NOT NULL;

INSERT INTO omniq_documents
SELECT 'newest', tasks.id, old.result, NULL
FROM omniq_newest AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT INTO omniq_documents
SELECT 'progress', tasks.id, old.report, NULL
FROM omniq_progress AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT INTO omniq_documents
SELECT 'checkpoint', id, omniq_checkpoint(saved_at, checkpoint), saved_at FROM omniq_checkpoints;

INSERT INTO omniq_documents
SELECT 'schedule', id, omniq_schedule(version, schedule, task), omniq_next_at(schedule)
FROM omniq_schedules;

INSERT INTO omniq_documents SELECT 'paused_queue', queue, x'', NULL FROM omniq_paused;
INSERT INTO omniq_documents
SELECT 'gate', key, state, NULL FROM omniq_gates WHERE NOT omniq_is_idle(state);

DROP TABLE omniq_old_live;
DROP TABLE omniq_old_finished;
DROP TABLE omniq_old_dead;
DROP TABLE omniq_newest;
DROP TABLE omniq_progress;
DROP TABLE omniq_checkpoints;
DROP TABLE omniq_schedules;
DROP TABLE omniq_paused;
DROP TABLE omniq_gates
