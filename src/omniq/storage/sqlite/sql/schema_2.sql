-- Upgrades an SQLite store from version 1 to version 2: see schema.sql.
CREATE INDEX omniq_retrying ON omniq_live (seq) WHERE status = 'retrying';
CREATE INDEX omniq_ended_badly ON omniq_finished (status, seq) WHERE status <> 'success'
