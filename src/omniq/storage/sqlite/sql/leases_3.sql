-- Upgrades the leases of an SQLite store from version 2 to version 3: see leases.sql.
ALTER TABLE omniq_leases ADD COLUMN length INTEGER NOT NULL DEFAULT 0;
ALTER TABLE omniq_leases ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE omniq_leases ADD COLUMN beat INTEGER NOT NULL DEFAULT 0;
ALTER TABLE omniq_leases ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
UPDATE omniq_leases SET paused = 1 WHERE owner IN (SELECT owner FROM omniq_resting);
DROP TABLE omniq_resting;
CREATE TABLE omniq_lease_file (id TEXT PRIMARY KEY) WITHOUT ROWID;
INSERT INTO omniq_lease_file VALUES (hex(randomblob(16)))
