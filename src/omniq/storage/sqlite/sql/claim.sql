-- Claims tasks for an owner: applies `row_rules.claim` to all rows of a claim.
-- :owner, :now, :seqs (a JSON array), :floor (the first token of the store's epoch)
UPDATE omniq_live
SET place = 4, status = 'running', owner = :owner, token = max(token + 1, :floor), started_at = :now,
    parked = NULL, lot = NULL
WHERE seq IN (SELECT value FROM json_each(:seqs))
