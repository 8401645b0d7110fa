-- Keeps a new task that is due and that nothing is asked about but its id: at half the cost of
-- `enqueue`, most of which is to say what all its functions are.
-- uses: waking
-- keys: tasks places ids ready sequence counts
-- request   1, 2 as everywhere; 3 id, 4 record, 5 queue, 6 rank, 7 flags, 8 token (see inserting)
-- returns   1, or 0 when a record has that id, and `enqueue` has to see what it is
local _, _, id, record, queue, rank, flags, token = unpack(cmsgpack.unpack(ARGV[1]))
if redis.call('HEXISTS', tasks, id) == 1 then return 0 end

local number = redis.call('INCR', sequence)
local core = queue .. '/' .. rank .. string.format('%016.0f', number) .. flags .. token
redis.call('HSET', tasks, id, record)
redis.call('HSET', places, id, 'r' .. core .. '/')
redis.call('ZADD', ids, 0, id)
redis.call('ZADD', ready, 0, core .. '/' .. id)
redis.call('HINCRBY', counts, queue .. '/p', 1)
wake(queue, 1)
send_wakes()
return 1
