-- The leases of a store's owners, version 2, in a separate database: a process that is stopped in
-- the middle of a write to the store must not make the leases of other owners expire.
--
-- `until` is a time of the boot clock, valid in the boot `boot_id`. The row of a fenced owner stays,
-- so that it cannot renew; `at` (microseconds since 1970) is the time of the last write, for pruning.

CREATE TABLE omniq_leases (
    owner   TEXT PRIMARY KEY,
    boot_id TEXT    NOT NULL,
    until   INTEGER NOT NULL,
    fenced  INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    info    BLOB
) WITHOUT ROWID;

-- Workers that an operator has paused. A row is deleted when the owner's lease ends.
CREATE TABLE omniq_resting (owner TEXT PRIMARY KEY) WITHOUT ROWID
