-- Hints for those who wait: workers that found too little, and whoever awaits a result.
-- keys: idle awaited
-- idle is a hash of channels, each with the queues its worker claims from: '*' or '/a/b/'.
local claimable = {}

-- So many tasks of the queue may have become claimable; '' is any queue.
local function wake(queue, number)
  claimable[queue] = (claimable[queue] or 0) + number
end

local function is_wanted(interest)
  for queue, left in pairs(claimable) do
    -- One more than there are tasks: a worker may be gone without the server knowing it yet.
    if left >= 0 and (queue == '' or interest == '*'
        or string.find(interest, '/' .. queue .. '/', 1, true)) then
      return queue
    end
  end
end

-- Tell as many waiting workers as there are tasks; each is told once until it waits again.
local function send_wakes()
  if next(claimable) == nil then return end
  local waiting = redis.call('HGETALL', idle)
  for position = 1, #waiting, 2 do
    local queue = is_wanted(waiting[position + 1])
    if queue then
      redis.call('HDEL', idle, waiting[position])
      if redis.call('PUBLISH', waiting[position], '') > 0 then
        claimable[queue] = claimable[queue] - 1
      end
    end
  end
end

-- Tell whoever awaits one of these tasks that it has ended.
local function tell_ended(ended_ids)
  if #ended_ids == 0 or redis.call('EXISTS', awaited) == 0 then return end
  local told = {}
  for _, id in ipairs(ended_ids) do
    if redis.call('SREM', awaited, id) == 1 then told[#told + 1] = id end
  end
  if #told > 0 then redis.call('PUBLISH', awaited, table.concat(told, ' ')) end
end
