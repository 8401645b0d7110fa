-- The leases of a store's owners, version 2, in a database beside it: a process that is stopped in
-- the middle of a write to the store must not end the lease of anybody else.
--
-- `until` counts by the boot clock of `boot_id`. A fenced owner stays, so that it cannot renew;
-- `at` (microseconds since 1970) says when it was last written, for pruning.

CREATE TABLE omniq_leases (
    owner   TEXT PRIMARY KEY,
    boot_id TEXT    NOT NULL,
    until   INTEGER NOT NULL,
    fenced  INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    info    BLOB
) WITHOUT ROWID;

-- Workers that an operator has paused; they go with their leases.
CREATE TABLE omniq_resting (owner TEXT PRIMARY KEY) WITHOUT ROWID
