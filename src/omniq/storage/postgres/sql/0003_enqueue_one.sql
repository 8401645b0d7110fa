-- Version 3: adds the function `enqueue_one`, and comments that describe the tables.
-- {schema}  the store's schema
COMMENT ON TABLE {schema}.live IS 'omniq: tasks that have not ended';
COMMENT ON TABLE {schema}.finished IS 'omniq: tasks that have ended, until their result_ttl';
COMMENT ON TABLE {schema}.dead IS 'omniq: dead letters';
