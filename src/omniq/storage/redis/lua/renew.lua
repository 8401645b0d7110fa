-- Extends the lease of an owner.
-- uses: request held_rows
-- keys: leases workers places idle resting
-- request   3 owner, 4 length in microseconds, 5 who it is, 6 whether this is its first lease
-- returns   'lost' when it had one and has none any more; else whether it is paused, and
--           id and place of all it holds
local owner, length, info, is_first = request[3], request[4], request[5], request[6] == 1
if not is_first and not redis.call('ZSCORE', leases, owner) then return 'lost' end
redis.call('HDEL', idle, '') -- as in turn: allowed when memory is full
redis.call('ZADD', leases, now + length, owner)
redis.call('HSET', workers, owner, info)
local answer = { redis.call('SISMEMBER', resting, owner) }
for _, id in ipairs(held_ids(owner)) do
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGET', places, id) or ''
end
return answer
