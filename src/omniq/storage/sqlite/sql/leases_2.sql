-- Upgrades the leases of an SQLite store from version 1 to version 2: see leases.sql.
CREATE TABLE omniq_resting (owner TEXT PRIMARY KEY) WITHOUT ROWID
