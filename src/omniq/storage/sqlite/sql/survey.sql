-- What a claim has to look after, in one glance.
-- :owner, :due_by
-- returns   whether something came due, whether something is parked, whether there are suspects,
--           whether the owner holds one
SELECT
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 2 AND visible <= :due_by),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 3 AND lot > ''),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 1 AND queue > ''),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 4 AND crashes > 0 AND owner = :owner)
