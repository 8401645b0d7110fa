-- Extends the lease of an owner.
-- uses: request held
-- keys: leases workers idle paused_workers
-- request   3 owner, 4 length in microseconds, 5 its worker record, 6 whether this is its first lease
-- returns   'lost' when it had a lease and has none any more; else whether it is paused, and
--           id and place of each task it holds
local owner, length, info, is_first = request[3], request[4], request[5], request[6] == 1
if not is_first and not redis.call('ZSCORE', leases, owner) then return 'lost' end
redis.call('HDEL', idle, '') -- as in record_and_claim: then writing is allowed when memory is full
redis.call('ZADD', leases, now + length, owner)
redis.call('HSET', workers, owner, info)
local answer = { redis.call('SISMEMBER', paused_workers, owner) }
append_places(answer, owner)
return answer
