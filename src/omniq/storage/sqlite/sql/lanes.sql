-- The lanes that have tasks to claim: place (0 ready, 1 suspects), queue, function. Reads one index entry
-- for each wanted function, not one for each task.
-- {queue}   of claims from all queues '', else the column queue; {index} is the index that it needs
-- :places (a JSON array of places), :queues (of names), :ranges (an object: the end of each range of
--           functions by its beginning)
-- returns   a JSON array of [place, queue, number of the function, its path]
SELECT json_group_array(json_array(places.value, queues.value, functions.id, functions.path))
FROM json_each(:ranges) AS ranges
CROSS JOIN omniq_functions AS functions
    ON functions.path >= ranges.key AND functions.path < ranges.value
CROSS JOIN json_each(:places) AS places
CROSS JOIN json_each(:queues) AS queues
WHERE EXISTS (
    SELECT 1 FROM omniq_live AS head INDEXED BY {index}
    WHERE head.place <= 1 AND head.place = places.value AND {queue} = queues.value
        AND head.func = functions.id
)
