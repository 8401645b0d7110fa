-- Version 9: the functions that record and claim look up each limit and each unique key by its name.
-- {schema}  the store's schema

DROP FUNCTION IF EXISTS {schema}.lock_limits(text[], boolean, boolean);
