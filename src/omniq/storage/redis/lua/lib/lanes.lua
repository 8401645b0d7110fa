-- The ready order. A lane has the ready tasks of one queue and function, suspects and others apart:
-- its members of `ready` are `<suspect><queue>/<function>/<order>/<id>`. `heads` has the first task of
-- each lane, as `<function>/<order>/<suspect><queue>`, so that a claim from all queues reads only the
-- lanes it takes from. `lane_heads` has the order of each lane's head.
local lane_changes = {} -- lane → { the first order that was added, whether tasks were removed }

local function change_lane(lane, added)
  local change = lane_changes[lane]
  if not change then
    change = {}
    lane_changes[lane] = change
  end
  if not added then
    change.removed = true
  elseif not change.added or added < change.added then
    change.added = added
  end
end

-- Make the heads those of the lanes, once `ready` has been written.
local function update_heads()
  for lane, change in pairs(lane_changes) do
    local known = redis.call('HGET', KEYS.lane_heads, lane)
    local head = known
    if change.removed then
      local beyond = '(' .. string.sub(lane, 1, -2) .. '0' -- '0' comes right after '/'
      local first = redis.call('ZRANGEBYLEX', KEYS.ready, '[' .. lane, beyond, 'LIMIT', 0, 1)[1]
      head = first and string.sub(first, #lane + 1, #lane + ORDER_LAST - ORDER_FIRST + 1) or false
    elseif not known or change.added < known then
      head = change.added
    end
    if head ~= known then
      local queue, func = string.match(lane, '^([^/]*)/([^/]*)/$')
      if known then redis.call('ZREM', KEYS.heads, func .. '/' .. known .. '/' .. queue) end
      if head then
        redis.call('ZADD', KEYS.heads, 0, func .. '/' .. head .. '/' .. queue)
        redis.call('HSET', KEYS.lane_heads, lane, head)
      else
        redis.call('HDEL', KEYS.lane_heads, lane)
      end
    end
  end
  lane_changes = {}
end
