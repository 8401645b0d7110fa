-- What a claim has to consider besides ready tasks.
-- :owner, :now
-- returns   whether the owner is fenced, the store's epoch, whether delayed tasks are due, whether a gate is
--           due, whether the owner holds a suspect, and the paused queues as a JSON array
SELECT
    EXISTS (SELECT 1 FROM omniq_fences WHERE owner = :owner),
    coalesce((SELECT due FROM omniq_documents WHERE kind = 'store' AND key = 'store'), 0),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 2 AND visible <= :now),
    EXISTS (
        SELECT 1 FROM omniq_documents WHERE kind = 'gate' AND due IS NOT NULL AND due <= :now
    ),
    EXISTS (SELECT 1 FROM omniq_live WHERE place = 4 AND crashes > 0 AND owner = :owner),
    (SELECT json_group_array(key) FROM omniq_documents WHERE kind = 'paused_queue')
