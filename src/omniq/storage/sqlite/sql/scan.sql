-- Tasks between two positions in the order of enqueue, the newest first.
-- {any}, {joins} see tables.py
-- {found}   a query for the seq of matching tasks, see scan.py
-- :limit, :now, :lowest_seq (inclusive), :before (exclusive), and the parameters of {found}
-- returns   a JSON array of rows
SELECT json_group_array(json_array({any}))
FROM (SELECT seq FROM ({found}) ORDER BY seq DESC LIMIT :limit) AS page
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = page.seq
{joins}
