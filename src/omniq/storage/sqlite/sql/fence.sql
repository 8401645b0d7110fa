-- Fences an owner in the database of the leases, with a lease or without.
-- :owner, :at
INSERT INTO omniq_leases (owner, boot_id, until, fenced, at) VALUES (:owner, '', 0, 1, :at)
ON CONFLICT (owner) DO UPDATE SET fenced = 1, at = :at
