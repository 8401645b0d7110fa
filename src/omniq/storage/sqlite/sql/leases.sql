-- The leases of a store's owners, version 3, in a separate database: a process that is stopped in
-- the middle of a write to the store must not make the leases of other owners expire.
--
-- `until` is a time of the boot clock, valid in the boot `boot_id`; `length` is that of the lease. The
-- row of a fenced owner stays, so that it cannot renew; `at` (microseconds since 1970) is the time of
-- the last write, for pruning. An operator has paused an owner with `paused`. `epoch` is
-- that of the store, and `beat` the number of renewals.

CREATE TABLE omniq_leases (
    owner   TEXT PRIMARY KEY,
    boot_id TEXT    NOT NULL,
    until   INTEGER NOT NULL,
    fenced  INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    info    BLOB,
    length  INTEGER NOT NULL DEFAULT 0,
    epoch   INTEGER NOT NULL DEFAULT 0,
    beat    INTEGER NOT NULL DEFAULT 0,
    paused  INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- The one row has the id of this file, which the store knows: see store_record.py.
CREATE TABLE omniq_lease_file (id TEXT PRIMARY KEY) WITHOUT ROWID;
INSERT INTO omniq_lease_file VALUES (hex(randomblob(16)))
