-- From version 1 of the leases of an SQLite store to version 2: see leases.sql.
CREATE TABLE omniq_resting (owner TEXT PRIMARY KEY) WITHOUT ROWID
