-- Ends the lease of an owner at its request: it can no longer claim or record.
-- uses: request held
-- keys: leases workers idle paused_workers
-- request   3 owner, 4 its channel or ''
-- returns   now, then id, place, record and state of each task it still holds
local owner = request[3]
redis.call('HDEL', idle, request[4])
redis.call('ZREM', leases, owner)
redis.call('HDEL', workers, owner)
redis.call('SREM', paused_workers, owner)
local answer = { string.format('%.0f', now) }
append_rows(answer, owner)
return answer
