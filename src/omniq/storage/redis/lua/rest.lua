-- Notes whether a worker is to claim.
-- uses: request
-- keys: leases resting
-- request   3 owner, 4 whether it is paused
-- returns   whether it has a lease
local owner, paused = request[3], request[4] == 1
local until_when = redis.call('ZSCORE', leases, owner)
if not until_when or tonumber(until_when) <= now then return 0 end
redis.call(paused and 'SADD' or 'SREM', resting, owner)
return 1
