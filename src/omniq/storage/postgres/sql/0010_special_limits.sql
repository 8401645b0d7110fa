-- Version 10: limits that count units, or that an operator has changed.
-- {schema}  the store's schema

-- It returns one more column.
DROP FUNCTION IF EXISTS {schema}.unpack_limits(bytea[]);
