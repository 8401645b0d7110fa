-- Move tasks that have come due to where claims look, the earliest first.
-- :due_by   what is visible by then is due
-- :limit    at most that many, so that one transaction stays short
-- changes() how many were moved
UPDATE omniq_live
SET place = CASE WHEN lot IS NULL THEN crashes > 0 ELSE 3 END
WHERE place = 2 AND seq IN (
    SELECT seq FROM omniq_live WHERE place = 2 AND visible <= :due_by ORDER BY visible LIMIT :limit
)
