-- Stores a new task that is due and needs no other changes, at half the cost of `write`, which spends
-- most of its time on defining its functions.
-- uses: wakeups
-- request   1, 2 as in lib/request; 3 id, 4 place up to the sequence, 5 place behind it, 6 record, 7 queue, 8 function
-- returns   1, or 0 when a record has that id
local _, _, id, head, foot, record, queue, func = unpack(cmsgpack.unpack(ARGV[1]))
if redis.call('HEXISTS', KEYS.tasks, id) == 1 then return 0 end

local lane = '0' .. queue .. '/' .. func .. '/'
local place = head .. string.format('%016.0f', redis.call('INCR', KEYS.sequence)) .. foot
local order = string.sub(place, ORDER_FIRST, ORDER_LAST)
redis.call('HSET', KEYS.tasks, id, record)
redis.call('HSET', KEYS.places, id, place)
redis.call('ZADD', KEYS.ids, 0, id)
redis.call('ZADD', KEYS.ready, 0, lane .. order .. '/' .. id)
redis.call('HINCRBY', KEYS.counts, queue .. '/p', 1)
local known = redis.call('HGET', KEYS.lane_heads, lane)
if not known or order < known then
  if known then redis.call('ZREM', KEYS.heads, func .. '/' .. known .. '/0' .. queue) end
  redis.call('ZADD', KEYS.heads, 0, func .. '/' .. order .. '/0' .. queue)
  redis.call('HSET', KEYS.lane_heads, lane, order)
end
add_claimable(queue, func, 1)
send_wakeups()
return 1
