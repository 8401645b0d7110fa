-- Version 13: a claim costs no more because there are more queues.
-- {schema}  the store's schema

-- The order of claims across queues. A store that uses one queue, the default one, has no entries here.
CREATE INDEX IF NOT EXISTS live_across_queues ON {schema}.live (place, func_path, rank, turn, seq) WHERE place < 2 AND queue <> 'default';
