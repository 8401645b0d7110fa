-- Wake-ups: for workers whose last claim found too few tasks, and for callers that await a result.
-- keys: idle awaited
-- idle is a hash of channels, each with the queues its worker claims from: '*' or '/a/b/'.
local claimable = {} -- queue → number of tasks that may have become claimable; '' is any queue

local function add_claimable(queue, number)
  claimable[queue] = (claimable[queue] or 0) + number
end

-- A queue with claimable tasks for a worker with that interest; nil when there is none.
local function claimable_queue(interest)
  for queue, left in pairs(claimable) do
    -- One more than there are tasks: a worker may be gone before the server notices.
    if left >= 0 and (queue == '' or interest == '*'
        or string.find(interest, '/' .. queue .. '/', 1, true)) then
      return queue
    end
  end
end

-- Notify as many waiting workers as there are tasks; each gets one wake-up until it waits again.
local function send_wakeups()
  if next(claimable) == nil then return end
  local waiting = redis.call('HGETALL', idle)
  for position = 1, #waiting, 2 do
    local queue = claimable_queue(waiting[position + 1])
    if queue then
      redis.call('HDEL', idle, waiting[position])
      if redis.call('PUBLISH', waiting[position], '') > 0 then
        claimable[queue] = claimable[queue] - 1
      end
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
