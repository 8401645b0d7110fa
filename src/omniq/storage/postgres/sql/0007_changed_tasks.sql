-- Version 7: the queue and the body of a waiting task can be changed. Only functions differ, which are created again.
-- {schema}  the store's schema

-- A migration needs a statement.
COMMENT ON TABLE {schema}.live IS 'omniq: tasks that have not ended';
