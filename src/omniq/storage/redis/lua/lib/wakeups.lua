-- Wake-ups: for workers whose last claim found too few tasks, and for callers that await a result.
-- keys: idle awaited delayed
-- `idle` is a hash of channels, each with what its worker claims: '*', or packed
-- { queues or 0, runnable (see lib/candidates) }.
local claimable = {} -- { queue, function, number of tasks that may have become claimable }
local places_of_claimable = {} -- queue/function → position in `claimable`
local first_delayed -- as a stamp; read for the first task that is not due yet

local function add_claimable(queue, func, number)
  local name = queue .. '/' .. func
  local position = places_of_claimable[name]
  if not position then
    position = #claimable + 1
    places_of_claimable[name] = position
    claimable[position] = { queue, func, 0 }
  end
  claimable[position][3] = claimable[position][3] + number
end

-- A worker that waits until the first task comes due has to wait for an earlier one now.
local function add_delayed(visible, queue, func)
  first_delayed = first_delayed or redis.call('ZRANGEBYLEX', delayed, '-', '+', 'LIMIT', 0, 1)[1] or '~'
  if visible < first_delayed then
    first_delayed = visible
    add_claimable(queue, func, 0)
  end
end

local function contains(list, value)
  for _, each in ipairs(list) do
    if each == value then return true end
  end
  return false
end

local function is_interested(interest, queue, func)
  if interest == '*' or queue == '' then return true end
  local queues, runnable = unpack(cmsgpack.unpack(interest))
  local modules, names, excluded = unpack(runnable)
  if queues ~= 0 and not contains(queues, queue) then return false end
  if contains(excluded, func) then return false end
  if modules == 0 then return true end
  for _, module in ipairs(modules) do
    if string.sub(func, 1, #module + 1) == module .. '.' then return true end
  end
  return contains(names, func)
end

-- Tasks that may have become claimable for a worker with that interest; nil when there are none.
local function claimable_for(interest)
  for _, each in ipairs(claimable) do
    -- One more than there are tasks: a worker may be gone before the server notices.
    if each[3] >= 0 and is_interested(interest, each[1], each[2]) then return each end
  end
end

-- Notify as many waiting workers as there are tasks; each gets one wake-up until it waits again.
local function send_wakeups()
  if #claimable == 0 then return end
  local waiting = redis.call('HGETALL', idle)
  for position = 1, #waiting, 2 do
    local found = claimable_for(waiting[position + 1])
    if found then
      redis.call('HDEL', idle, waiting[position])
      if redis.call('PUBLISH', waiting[position], '') > 0 then found[3] = found[3] - 1 end
    end
  end
end

-- Notify the callers that await one of these tasks that it has ended.
local function notify_ended(ended_ids)
  if #ended_ids == 0 or redis.call('EXISTS', awaited) == 0 then return end
  local notified = {}
  for _, id in ipairs(ended_ids) do
    if redis.call('SREM', awaited, id) == 1 then notified[#notified + 1] = id end
  end
  if #notified > 0 then redis.call('PUBLISH', awaited, table.concat(notified, ' ')) end
end
