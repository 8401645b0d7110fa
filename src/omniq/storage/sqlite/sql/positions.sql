-- The positions of the first tasks of lanes, of each lane as many as wanted.
-- {queue}, {index} see lanes.sql
-- :lanes    a JSON array of [place, queue, func, rank, turn, seq]: a lane, and the position behind
--           which it is read
-- :due_by, :limit
-- returns   a JSON array of [rank, turn, seq, index of the lane]
SELECT json_group_array(json_array(live.rank, live.turn, live.seq, lane.key))
FROM json_each(:lanes) AS lane
CROSS JOIN omniq_live AS live ON live.seq IN (
    SELECT head.seq FROM omniq_live AS head INDEXED BY {index}
    WHERE head.place <= 1 AND head.place = json_extract(lane.value, '$[0]')
        AND {queue} = json_extract(lane.value, '$[1]')
        AND head.func = json_extract(lane.value, '$[2]')
        AND (head.rank, head.turn, head.seq) > (
            json_extract(lane.value, '$[3]'), json_extract(lane.value, '$[4]'),
            json_extract(lane.value, '$[5]')
        )
        AND head.visible <= :due_by
    ORDER BY head.rank, head.turn, head.seq LIMIT :limit
)
