-- Moves delayed tasks that have become due to the ready places, the earliest first.
-- :due_by   tasks that are visible by then are due
-- :limit    the maximum, so that one transaction stays short
-- changes() the number of moved tasks
UPDATE omniq_live
SET place = CASE WHEN parked IS NULL THEN crashes > 0 ELSE 3 END
WHERE place = 2 AND seq IN (
    SELECT seq FROM omniq_live WHERE place = 2 AND visible <= :due_by ORDER BY visible LIMIT :limit
)
