-- The lanes that have tasks to claim: place (0 ready, 1 suspects), queue, function. Reads one index entry
-- for each lane, not one for each task.
-- {queue}   of claims from all queues '', else the column queue; {index} is the index that it needs
-- :places (a JSON array of places), :queues (of names), :ranges (of [first function, end])
-- returns   a JSON array of [place, queue, func_path]
WITH RECURSIVE
    ranges (place, queue, low, high) AS (
        SELECT places.value, queues.value, json_extract(range.value, '$[0]'),
            json_extract(range.value, '$[1]')
        FROM json_each(:places) AS places
        CROSS JOIN json_each(:queues) AS queues
        CROSS JOIN json_each(:ranges) AS range
    ),
    lanes (place, queue, func_path, high) AS (
        SELECT place, queue, (
            SELECT next.func_path FROM omniq_live AS next INDEXED BY {index}
            WHERE next.place <= 1 AND next.place = ranges.place AND {queue} = ranges.queue
                AND next.func_path >= ranges.low AND next.func_path < ranges.high
            ORDER BY next.func_path LIMIT 1
        ), high
        FROM ranges
        UNION ALL
        SELECT place, queue, (
            SELECT next.func_path FROM omniq_live AS next INDEXED BY {index}
            WHERE next.place <= 1 AND next.place = lanes.place AND {queue} = lanes.queue
                AND next.func_path > lanes.func_path AND next.func_path < lanes.high
            ORDER BY next.func_path LIMIT 1
        ), high
        FROM lanes WHERE lanes.func_path IS NOT NULL
    )
SELECT json_group_array(json_array(place, queue, func_path)) FROM lanes WHERE func_path IS NOT NULL
