-- Version 8: running limits are applied by the function that records and claims. Workers of the version before call the
-- functions that they know, and apply the limits by the rules, in Python.
-- {schema}  the store's schema

COMMENT ON COLUMN {schema}.live.gates IS
    'omniq: the keys of the limits and breakers; if all are running limits, then their sizes, each after a "="';

-- Claims that leave running limits: the keys and sizes of the limits, and of each limit how many leave it, packed one
-- after the other.
CREATE TYPE {schema}.leaving AS (keys text[], sizes bigint[], counts int[], holders bytea[]);

DROP FUNCTION IF EXISTS {schema}.pick(text[], text[], int, bigint);
