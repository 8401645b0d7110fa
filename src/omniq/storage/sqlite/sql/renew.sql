-- Extends the lease of an owner that has one, in the database of the leases.
-- :owner, :boot, :now, :length, :at, :info, :epoch (the store's), :beat (that the owner knows)
-- changes() 0 if the owner may not renew it
UPDATE omniq_leases
SET boot_id = :boot, until = :now + :length, at = :at, info = :info, length = :length, beat = beat + 1
WHERE owner = :owner AND fenced = 0 AND epoch = :epoch AND beat >= :beat
