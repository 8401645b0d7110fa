-- Version 12: the fast path leaves tasks without a place in line to the rules. Only functions differ, which are created again.
-- {schema}  the store's schema

-- A migration needs a statement.
COMMENT ON TABLE {schema}.live IS 'omniq: tasks that have not ended';
