-- Ends the lease of an owner if it has expired, or if the owner asks for it.
-- uses: request
-- request   3 owner, 4 whether the owner asks, 5 its channel or '', 6 the end of a lease that is valid only
--           because the clock was set back, or '': if it has another one, it was renewed meanwhile
-- returns   whether the owner has no lease now
local FENCE_SECONDS = 86400 -- longer than any request can be delayed
local owner = request[3]
local lease_until = redis.call('ZSCORE', KEYS.leases, owner)
local is_overdue = lease_until and string.format('%.0f', lease_until) == request[6]
if lease_until and tonumber(lease_until) > now and request[4] == 0 and not is_overdue then return 0 end
local beat = string.match(redis.call('HGET', KEYS.workers, owner) or '', '^%d/%d+/%d+/(%d+)/')
if beat then
  redis.call('ZADD', KEYS.fences, now_text, owner .. '/' .. beat)
  redis.call('ZREMRANGEBYSCORE', KEYS.fences, '-inf', string.format('%.0f', now - FENCE_SECONDS * 1000000))
  redis.call('EXPIRE', KEYS.fences, FENCE_SECONDS)
end
redis.call('ZREM', KEYS.leases, owner)
redis.call('HDEL', KEYS.workers, owner, owner .. '#')
redis.call('HDEL', KEYS.idle, request[5])
return 1
