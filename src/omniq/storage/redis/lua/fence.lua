-- Ends the lease of an owner if it has expired, or if the owner asks for it.
-- uses: request
-- request   3 owner, 4 whether the owner asks, 5 its channel or ''
-- returns   whether the owner has no lease now
local owner = request[3]
local lease_until = redis.call('ZSCORE', KEYS.leases, owner)
if lease_until and tonumber(lease_until) > now and request[4] == 0 then return 0 end
redis.call('ZREM', KEYS.leases, owner)
redis.call('HDEL', KEYS.workers, owner)
redis.call('HDEL', KEYS.idle, request[5])
return 1
