-- The rules of omniq.gate_rules, written again in Lua. A test compares the two.
-- keys: gates blocked
-- A gate is { key, kind, size, span }. The sorted set `blocked` has every gate with parked tasks, by the
-- time at which to check it again; a gate's name there is its key without slashes.
local FOREVER = 2 ^ 62

local gate_states, is_changed = {}, {}

local function gate_state(key)
  if not gate_states[key] then
    local known = redis.call('HGET', gates, key)
    gate_states[key] = known and cmsgpack.unpack(known) or {
      holders = {}, starts = {}, breaker = 'closed', failures = 0, opened_at = 0, reason = '', wake_at = 0,
    }
  end
  return gate_states[key]
end

local function room(gate, state, at)
  local kind, size, span = gate[2], gate[3], gate[4]
  if kind == 'running' then return math.max(0, size - #state.holders) end
  if kind == 'rate' then
    -- The starts are sorted: those within the span lie next to each other.
    local last = #state.starts
    while last > 0 and state.starts[last] >= at + span do last = last - 1 end
    local first = last
    while first > 0 and state.starts[first] > at - span do first = first - 1 end
    return math.max(0, size - (last - first))
  end
  if state.breaker == 'closed' then return FOREVER end
  return state.breaker == 'open' and state.opened_at + span <= at and 1 or 0
end

local function ask_again_at(gate, state, at)
  local kind, size, span = gate[2], gate[3], gate[4]
  if kind == 'rate' and #state.starts >= size then return state.starts[#state.starts - size + 1] + span end
  if kind == 'breaker' and state.breaker == 'open' then return state.opened_at + span end
  return FOREVER
end

local function enter(gate, state, id, token, at)
  local kind, size, span = gate[2], gate[3], gate[4]
  if kind == 'running' then
    table.insert(state.holders, { id, token })
  elseif kind == 'rate' then
    -- Starts may lie a little ahead; a start that lies ahead by a span or more was written before the
    -- clock was set back, and counts as of now.
    local starts, copies = state.starts, 1
    while #starts > 0 and starts[#starts] >= at + span do
      table.remove(starts)
      copies = copies + 1
    end
    local position = #starts
    while position > 0 and starts[position] > at do position = position - 1 end
    for _ = 1, copies do table.insert(starts, position + 1, at) end
    while #starts > size do table.remove(starts, 1) end
  elseif state.breaker == 'open' then
    state.breaker = 'half_open'
    state.holders = { { id, token } }
  end
end

local function drop_holder(state, id, token)
  for position, holder in ipairs(state.holders) do
    if holder[1] == id and holder[2] == token then
      table.remove(state.holders, position)
      return true
    end
  end
  return false
end

local function open_breaker(state, opened_at, wake_at, reason)
  state.breaker, state.opened_at, state.wake_at, state.reason = 'open', opened_at, wake_at, reason
end

local function leave_breaker(gate, state, id, token, effect, at, reason)
  local size, span = gate[3], gate[4]
  local was_probe = drop_holder(state, id, token)
  if state.breaker == 'closed' and effect == 'failure' then
    state.failures = state.failures + 1
    if state.failures >= size then open_breaker(state, at, at + span, reason) end
  elseif effect == 'success' and (was_probe or state.breaker == 'closed') then
    state.breaker, state.failures, state.reason, state.wake_at = 'closed', 0, '', 0
  elseif was_probe and effect == 'failure' then
    state.failures = state.failures + 1
    open_breaker(state, at, at + span, reason)
  elseif was_probe then
    -- The probe ended neither as a success nor as a failure: the next task may probe at once.
    open_breaker(state, at - span, at, state.reason)
  end
end

local function leave(gate, state, id, token, effect, at, reason)
  if gate[2] == 'running' then
    drop_holder(state, id, token)
    state.wake_at = 0
  elseif gate[2] == 'breaker' then
    leave_breaker(gate, state, id, token, effect, at, reason)
  end
end

-- The first gate that has no room, with its `wake_at` set; nil when the task may enter all of them.
local function blocking(task_gates, at)
  for _, gate in ipairs(task_gates) do
    local state = gate_state(gate[1])
    if room(gate, state, at) == 0 then
      state.wake_at = ask_again_at(gate, state, at)
      is_changed[gate[1]] = true
      return gate
    end
  end
end

-- The name of a gate in places and members, which has no slash.
local function gate_name(key)
  return (string.gsub(key, '[%%/]', { ['%'] = '%25', ['/'] = '%2F' }))
end

local function gate_key(name)
  return (string.gsub(name, '%%2[5F]', { ['%25'] = '%', ['%2F'] = '/' }))
end

-- Write the gates that have changed; returns whether parked tasks may have room now.
local function flush_gates()
  local has_room = false
  for key in pairs(is_changed) do
    local state, name = gate_states[key], gate_name(key)
    redis.call('HSET', gates, key, cmsgpack.pack(state))
    if redis.call('ZSCORE', blocked, name) then
      redis.call('ZADD', blocked, state.wake_at, name)
      has_room = has_room or state.wake_at <= now
    end
  end
  is_changed = {}
  return has_room
end
