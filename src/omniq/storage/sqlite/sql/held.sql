-- The tasks that owners hold.
-- {live}    see tables.py
-- :owners   a JSON array
-- returns   a JSON array of rows
SELECT json_group_array(json_array({live}))
FROM json_each(:owners) AS owners
CROSS JOIN omniq_live AS live ON live.place = 4 AND live.owner = owners.value
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq
