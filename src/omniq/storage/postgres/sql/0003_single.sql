-- Version 3: `enqueue_one` is there. The tables stay as they are, and say what they are for.
-- {schema}  the store's schema
COMMENT ON TABLE {schema}.live IS 'omniq: tasks that have not ended';
COMMENT ON TABLE {schema}.finished IS 'omniq: tasks that have ended, until their result_ttl';
COMMENT ON TABLE {schema}.dead IS 'omniq: dead letters';
