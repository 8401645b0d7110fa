-- What a claim has to consider besides ready tasks.
-- :owner, :now, :witness, :nonce and :token (the `seq`, the nonce and the token of its newest claim; the
-- `seq` of a task that is deleted may be given again)
-- returns   whether the owner is fenced, the store's epoch, whether the witness has a lower token, whether
--           delayed tasks are due, whether a gate is due, whether the owner holds a suspect, and the paused
--           queues as a JSON array
SELECT
    EXISTS (SELECT 1 FROM omniq_fences WHERE owner = :owner),
    coalesce((SELECT due FROM omniq_documents WHERE kind = 'store' AND key = 'store'), 0),
    EXISTS (
        SELECT 1 FROM omniq_live AS live CROSS JOIN omniq_tasks AS tasks ON tasks.seq = live.seq
        WHERE live.seq = :witness AND live.token < :token AND tasks.nonce = :nonce
    ),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 2 AND visible <= :now),
    EXISTS (
        SELECT 1 FROM omniq_documents WHERE kind = 'gate' AND due IS NOT NULL AND due <= :now
    ),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 4 AND crashes > 0 AND owner = :owner),
    (SELECT json_group_array(key) FROM omniq_documents WHERE kind = 'paused_queue')
