-- Sets whether a worker is paused and so claims nothing.
-- uses: request
-- request   3 owner, 4 whether it is paused
-- returns   whether it has a lease
local owner = request[3]
local lease_until, info = redis.call('ZSCORE', KEYS.leases, owner), redis.call('HGET', KEYS.workers, owner)
if not lease_until or tonumber(lease_until) <= now or not info then return 0 end
redis.call('HSET', KEYS.workers, owner, request[4] .. string.sub(info, 2))
return 1
