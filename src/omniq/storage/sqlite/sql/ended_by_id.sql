-- The ended task with that id: the state of its dead letter and of its finished record, unless that
-- has expired.
-- {columns} see tables.py; `state` here has no owner
-- :id, :now
-- returns   a JSON array of rows, the dead one first
SELECT json_group_array(json_array({columns}))
FROM omniq_tasks AS tasks
CROSS JOIN (
    SELECT seq, due, visible, status, attempts, crashes, releases, token, settled, NULL AS owner,
        started_at, cancel_requested, NULL AS parked, 0 AS attached, history
    FROM omniq_dead WHERE seq = (SELECT seq FROM omniq_tasks WHERE id = :id)
    UNION ALL
    SELECT seq, due, visible, status, attempts, crashes, releases, token, settled, NULL,
        started_at, cancel_requested, NULL, 0, history
    FROM omniq_finished WHERE seq = (SELECT seq FROM omniq_tasks WHERE id = :id) AND expires_at > :now
) AS state ON state.seq = tasks.seq
WHERE tasks.id = :id
