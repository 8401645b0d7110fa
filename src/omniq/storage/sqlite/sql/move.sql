-- Parks tasks under gates, or returns them to the ready places.
-- :moved    a JSON object: for each gate an array of seq; under '' those that return
UPDATE omniq_live
SET place = CASE moved.gate WHEN '' THEN crashes > 0 ELSE 3 END,
    parked = nullif(moved.gate, ''),
    lot = CASE moved.gate WHEN '' THEN NULL ELSE func || '/' || (crashes > 0) || '/' || queue END
FROM (
    SELECT gates.key AS gate, numbers.value AS seq
    FROM json_each(:moved) AS gates CROSS JOIN json_each(gates.value) AS numbers
    -- Without a limit, SQLite would search this for each live task.
    LIMIT -1
) AS moved
WHERE omniq_live.seq = moved.seq
