-- Some tasks of a stretch in the order of enqueue, the last one first.
-- {columns} see _sqlite.tables
-- {found}   the seq of what is in question, see _sqlite.scanning
-- :limit, :now, :floor (included), :before (not), and those that {found} names
-- returns   a JSON array of rows
SELECT json_group_array(json_array({columns}))
FROM (SELECT seq FROM ({found}) ORDER BY seq DESC LIMIT :limit) AS page
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = page.seq
LEFT JOIN omniq_live AS live ON live.seq = page.seq
LEFT JOIN omniq_finished AS finished ON finished.seq = page.seq
