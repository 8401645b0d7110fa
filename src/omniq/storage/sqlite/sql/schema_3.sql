-- Upgrades an SQLite store from version 2 to the newest version: see schema.sql, whose tables {schema}
-- creates. A row that its CHECKs refuse, which omniq has not written, is left out. The functions are in upgrade.py. The bodies of tasks, which are most of the data, stay where
-- they are.
ALTER TABLE omniq_tasks RENAME COLUMN unique_key TO "unique";
ALTER TABLE omniq_tasks ADD COLUMN stored_after INTEGER NOT NULL DEFAULT 0;

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

{schema};

INSERT OR IGNORE INTO omniq_functions (path) SELECT DISTINCT func_path FROM omniq_tasks;

-- What was parked is ready again: the next claims park it under its gates anew.
INSERT OR IGNORE INTO omniq_live (
    seq, place, queue, func, rank, turn, visible, status, attempts, crashes, token, settled, owner,
    started_at, cancel_requested, attached, rest
)
SELECT old.seq, CASE old.place WHEN 3 THEN old.crashes > 0 ELSE old.place END, old.queue,
    functions.id, ~old.priority, old.due, old.visible, old.status, old.attempts, old.crashes,
    old.token, old.settled, old.owner, old.started_at, old.cancel_requested, old.attached,
    omniq_rest(old.history, old.releases)
FROM omniq_old_live AS old
JOIN omniq_tasks AS tasks ON tasks.seq = old.seq
JOIN omniq_functions AS functions ON functions.path = tasks.func_path;

INSERT OR IGNORE INTO omniq_finished
SELECT seq, due, status, attempts, crashes, token, settled, started_at, cancel_requested,
    omniq_rest(history, releases), finished_at, expires_at, result
FROM omniq_old_finished;

INSERT OR IGNORE INTO omniq_dead
SELECT seq, id, due, status, attempts, crashes, token, settled, started_at, cancel_requested,
    omniq_rest(history, releases), last_failure, reason, letter
FROM omniq_old_dead;

INSERT OR IGNORE INTO omniq_documents
SELECT 'unique', old.unique_key, CAST(tasks.id AS BLOB), NULL
FROM omniq_old_live AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq
WHERE old.unique_key IS NOT NULL;

INSERT OR IGNORE INTO omniq_documents
SELECT 'newest', tasks.id, old.result, NULL
FROM omniq_newest AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT OR IGNORE INTO omniq_documents
SELECT 'progress', tasks.id, old.report, NULL
FROM omniq_progress AS old JOIN omniq_tasks AS tasks ON tasks.seq = old.seq;

INSERT OR IGNORE INTO omniq_documents
SELECT 'checkpoint', id, omniq_checkpoint(saved_at, checkpoint), saved_at FROM omniq_checkpoints;

INSERT OR IGNORE INTO omniq_documents
SELECT 'schedule', id, omniq_schedule(version, schedule, task), omniq_next_at(schedule)
FROM omniq_schedules;

INSERT OR IGNORE INTO omniq_documents SELECT 'paused_queue', queue, x'', NULL FROM omniq_paused;
INSERT OR IGNORE INTO omniq_documents
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
