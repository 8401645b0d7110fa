-- Workers with a lease, and who holds what.
-- uses: request
-- keys: leases workers held resting
-- returns   who they are; all members of `held`; who is paused
local owners = redis.call('ZRANGEBYSCORE', leases, string.format('(%.0f', now), '+inf')
if #owners == 0 then return { {}, {}, {} } end
return { redis.call('HMGET', workers, unpack(owners)), redis.call('ZRANGE', held, 0, -1),
  redis.call('SMEMBERS', resting) }
