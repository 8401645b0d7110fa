-- Version 2: indexes for scans by a rare status; the pause flag of a worker.
-- {schema}  the store's schema
--
-- Partial indexes: a task that succeeds at its first run has no entry in them.
CREATE INDEX live_retrying ON {schema}.live (id) WHERE status = 2;
CREATE INDEX finished_badly ON {schema}.finished (status, id) WHERE status <> 3;

-- Set by an operator, returned to the worker when it renews, deleted with the lease.
ALTER TABLE {schema}.leases ADD COLUMN paused boolean NOT NULL DEFAULT false;
