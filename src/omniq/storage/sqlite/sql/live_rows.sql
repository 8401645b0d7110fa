-- Live tasks, in the order of their `seq` in the parameter.
-- {live}    see tables.py
-- :seqs     a JSON array
-- returns   a JSON array of rows
SELECT json_group_array(json_array({live}))
FROM json_each(:seqs) AS wanted
CROSS JOIN omniq_live AS live ON live.seq = wanted.value
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = wanted.value
