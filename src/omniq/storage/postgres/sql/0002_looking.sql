-- Version 2: readers find the statuses that are mostly rare, and a worker can be paused.
-- {schema}  the store's schema
--
-- Partial: a task that ends well at its first run costs nothing here.
CREATE INDEX live_retrying ON {schema}.live (id) WHERE status = 2;
CREATE INDEX finished_badly ON {schema}.finished (status, id) WHERE status <> 3;

-- Set by an operator, told to the worker when it renews, and gone with its lease.
ALTER TABLE {schema}.leases ADD COLUMN paused boolean NOT NULL DEFAULT false;
