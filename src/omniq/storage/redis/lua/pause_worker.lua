-- Sets whether a worker is paused and so claims nothing.
-- uses: request
-- keys: leases paused_workers
-- request   3 owner, 4 whether it is paused
-- returns   whether it has a lease
local owner, is_paused = request[3], request[4] == 1
local lease_until = redis.call('ZSCORE', leases, owner)
if not lease_until or tonumber(lease_until) <= now then return 0 end
redis.call(is_paused and 'SADD' or 'SREM', paused_workers, owner)
return 1
