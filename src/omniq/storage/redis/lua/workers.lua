-- Reads the workers with a lease, and which tasks they hold.
-- uses: request
-- keys: leases workers held paused_workers
-- returns   their worker records; all members of `held`; the owners that are paused
local owners = redis.call('ZRANGEBYSCORE', leases, string.format('(%.0f', now), '+inf')
if #owners == 0 then return { {}, {}, {} } end
return { redis.call('HMGET', workers, unpack(owners)), redis.call('ZRANGE', held, 0, -1),
  redis.call('SMEMBERS', paused_workers) }
