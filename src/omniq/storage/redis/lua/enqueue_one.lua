-- Stores a new task that is due and has no unique key and no conditions, at half the cost of
-- `enqueue`, which spends most of its time on defining its functions.
-- uses: wakeups
-- keys: tasks places ids ready sequence counts
-- request   1, 2 as in lib/request; 3 id, 4 record, 5 queue, 6 rank, 7 flags, 8 token (see lib/insert)
-- returns   1, or 0 when a record has that id: then `enqueue` has to decide
local _, _, id, record, queue, rank, flags, token = unpack(cmsgpack.unpack(ARGV[1]))
if redis.call('HEXISTS', tasks, id) == 1 then return 0 end

local number = redis.call('INCR', sequence)
local core = queue .. '/' .. rank .. string.format('%016.0f', number) .. flags .. token
redis.call('HSET', tasks, id, record)
redis.call('HSET', places, id, 'r' .. core .. '/')
redis.call('ZADD', ids, 0, id)
redis.call('ZADD', ready, 0, core .. '/' .. id)
redis.call('HINCRBY', counts, queue .. '/p', 1)
add_claimable(queue, 1)
send_wakeups()
return 1
