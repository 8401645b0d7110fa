-- The ready order. A lane has the ready tasks of one queue and function, suspects and others apart:
-- its members of `ready` are `<suspect><queue>/<function>/<order>/<id>`. `heads` has the first task of
-- each lane, as `<function>/<order>/<suspect><queue>`, so that a claim from all queues reads only the
-- lanes it takes from.

-- The order of the first task of a lane; false if there is none.
local function head_of(lane)
  local beyond = '(' .. string.sub(lane, 1, -2) .. '0' -- '0' comes right after '/'
  local first = redis.call('ZRANGEBYLEX', KEYS.ready, '[' .. lane, beyond, 'LIMIT', 0, 1)[1]
  return first and string.sub(first, #lane + 1, #lane + ORDER_LAST - ORDER_FIRST + 1) or false
end

local function move_head(lane, from, to)
  local queue, func = string.match(lane, '^([^/]*)/([^/]*)/$')
  if from then redis.call('ZREM', KEYS.heads, func .. '/' .. from .. '/' .. queue) end
  if to then redis.call('ZADD', KEYS.heads, 0, func .. '/' .. to .. '/' .. queue) end
end
