-- Ends the lease of an owner by its own wish: it can claim and record no more.
-- uses: request held_rows
-- keys: leases workers idle resting
-- request   3 owner, 4 its channel or ''
-- returns   now, then id, place, record and state of all it still holds
local owner = request[3]
redis.call('HDEL', idle, request[4])
redis.call('ZREM', leases, owner)
redis.call('HDEL', workers, owner)
redis.call('SREM', resting, owner)
local answer = { string.format('%.0f', now) }
append_rows(answer, owner)
return answer
