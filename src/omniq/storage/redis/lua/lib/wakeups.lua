-- Wake-ups for workers whose last claim found too few tasks.
-- `idle` is a hash of channels, each with what its worker claims: '*', or packed
-- { queues or 0, runnable (see lib/candidates) }.
local claimable = {} -- { queue, function, number of tasks that may have become claimable }
local claimable_of = {} -- queue/function → one of them

local function add_claimable(queue, func, number)
  local name = queue .. '/' .. func
  local found = claimable_of[name]
  if not found then
    found = { queue, func, 0 }
    claimable_of[name] = found
    claimable[#claimable + 1] = found
  end
  found[3] = found[3] + number
end

local function has(list, value)
  for _, each in ipairs(list) do
    if each == value then return true end
  end
  return false
end

-- Whether a claim from these queues (0 for all) may take tasks of a function.
local function accepts(queues, runnable, queue, func)
  local modules, names, excluded = unpack(runnable)
  if (queues ~= 0 and not has(queues, queue)) or has(excluded, func) then return false end
  if modules == 0 then return true end
  for _, module in ipairs(modules) do
    if string.sub(func, 1, #module + 1) == module .. '.' then return true end
  end
  return has(names, func)
end

-- Notify as many waiting workers as there are tasks; each gets one wake-up until it waits again.
local function send_wakeups()
  if #claimable == 0 then return end
  local waiting = redis.call('HGETALL', KEYS.idle)
  if #waiting == 0 then return end

  local function is_interested(interest, queue, func)
    if interest == '*' or queue == '' then return true end
    local queues, runnable = unpack(cmsgpack.unpack(interest))
    return accepts(queues, runnable, queue, func)
  end

  for position = 1, #waiting, 2 do
    for _, each in ipairs(claimable) do
      -- One more than there are tasks: a worker may be gone before the server notices.
      if each[3] >= 0 and is_interested(waiting[position + 1], each[1], each[2]) then
        redis.call('HDEL', KEYS.idle, waiting[position])
        if redis.call('PUBLISH', waiting[position], '') > 0 then each[3] = each[3] - 1 end
        break
      end
    end
  end
end
