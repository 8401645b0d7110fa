-- The tasks among these that an owner holds, with the columns that others may have changed.
-- :owner, :seqs (a JSON array)
-- returns   a JSON array of [seq, token, cancel_requested, attached]
SELECT json_group_array(json_array(live.seq, live.token, live.cancel_requested, live.attached))
FROM json_each(:seqs) AS wanted
CROSS JOIN omniq_live AS live ON live.seq = wanted.value
WHERE live.place = 4 AND live.owner = :owner
