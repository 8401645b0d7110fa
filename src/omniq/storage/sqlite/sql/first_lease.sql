-- Inserts the first lease of an owner, in the database of the leases; or extends it, if the reply to the
-- first try was lost.
-- :owner, :boot, :now, :length, :at, :info, :epoch (the store's)
-- changes() 0 if the owner is fenced
INSERT INTO omniq_leases (owner, boot_id, until, fenced, at, info, length, epoch, beat)
VALUES (:owner, :boot, :now + :length, 0, :at, :info, :length, :epoch, 1)
ON CONFLICT (owner) DO UPDATE
SET boot_id = :boot, until = :now + :length, at = :at, info = :info, length = :length, epoch = :epoch,
    beat = beat + 1
WHERE fenced = 0
