-- The order in which claims from named queues, or beside paused ones, read ready tasks.
CREATE INDEX IF NOT EXISTS omniq_ready_by_queue ON omniq_live (place, queue, func, rank, turn)
WHERE place <= 1
