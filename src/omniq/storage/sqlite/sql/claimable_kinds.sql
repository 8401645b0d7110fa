-- Which kinds of tasks a claim has to consider.
-- :owner, :due_by
-- returns   whether delayed tasks are due, whether tasks are parked, whether there are suspects,
--           whether the owner holds a suspect
SELECT
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 2 AND visible <= :due_by),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 3 AND lot > ''),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 1 AND queue > ''),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 4 AND crashes > 0 AND owner = :owner)
