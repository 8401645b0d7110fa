-- Version 6: a channel that users without rights on the schema cannot name, so that they can neither notify nor listen.
-- Workers of version 5 listen on the old one: they get no notifications, and find everything by polling.
-- {schema}  the store's schema

-- One row. In a table, because every user of the database can read the source of a function.
CREATE TABLE {schema}.channel (name text NOT NULL);
INSERT INTO {schema}.channel VALUES ('omniq_' || replace(gen_random_uuid()::text, '-', ''));
COMMENT ON TABLE {schema}.channel IS 'omniq: the channel on which storages are notified';
