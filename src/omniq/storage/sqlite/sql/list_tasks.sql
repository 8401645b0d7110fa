-- A page of tasks, live and finished together, in id order.
-- {any}, {joins} see tables.py
-- :after, :limit, :now, and NULL or a value: :status, :queue, :func_path
-- returns   a JSON array of rows
SELECT json_group_array(json_array({any}))
FROM (
    SELECT tasks.seq AS seq
    FROM omniq_tasks AS tasks
    LEFT JOIN omniq_live AS live ON live.seq = tasks.seq
    LEFT JOIN omniq_finished AS finished ON finished.seq = tasks.seq AND finished.expires_at > :now
    WHERE tasks.id > :after
        AND coalesce(live.status, finished.status) IS NOT NULL
        AND (:status IS NULL OR coalesce(live.status, finished.status) = :status)
        AND (:queue IS NULL OR tasks.queue = :queue)
        AND (:func_path IS NULL OR tasks.func_path = :func_path)
    ORDER BY tasks.id LIMIT :limit
) AS page
CROSS JOIN omniq_tasks AS tasks ON tasks.seq = page.seq
{joins}
