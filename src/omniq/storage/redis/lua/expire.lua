-- Ends a lease that is valid only because the clock was set back.
-- uses: request
-- request   3 owner, 4 the end of the lease: if it has another one, it was renewed meanwhile
local owner = request[3]
local lease_until = redis.call('ZSCORE', KEYS.leases, owner)
if lease_until and string.format('%.0f', lease_until) == request[4] then
  redis.call('ZADD', KEYS.leases, 0, owner)
end
return 1
