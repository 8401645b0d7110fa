-- The claim: move tasks that came due to the sorted sets of waiting tasks, check their gates, and take
-- the first ones in order.
-- keys: places tasks states ids ready suspects parked delayed held conditions paused_queues blocked idle
local MOVED_PER_CALL = 1000
local PARKED_PER_CALL = 2000
local EXPIRED_PER_CALL = 200
local ONE = string.byte('1')

local sources, may_take_suspect, due_by, parked_count

-- Move tasks that have come due to the sets that a claim reads; false when there are more of them.
local function move_due()
  local due = redis.call('ZRANGEBYLEX', delayed, '-', '[' .. due_by .. '\255', 'LIMIT', 0, MOVED_PER_CALL)
  for _, member in ipairs(due) do
    local kind, waiting = string.sub(member, STAMP_SIZE + 1, STAMP_SIZE + 1), string.sub(member, STAMP_SIZE + 2)
    remove(delayed, member)
    add(waiting_set(kind), waiting)
    if kind == 'p' then redis.call('ZADD', blocked, 'NX', 0, string.match(waiting, '^[^/]*')) end
  end
  if #due > 0 then flush() end
  -- Claiming now could take a task before one of higher priority that is not moved yet.
  return #due < MOVED_PER_CALL
end

-- The parts of members between `prefix` and the next slash, each once, in order.
local function names_after(set, prefix)
  local names, from = {}, '[' .. prefix
  local to = prefix == '' and '+' or '(' .. string.sub(prefix, 1, -2) .. '0'
  if prefix == '' then from = '-' end
  while true do
    local first = redis.call('ZRANGEBYLEX', set, from, to, 'LIMIT', 0, 1)[1]
    if not first then return names end
    local name = string.match(first, '^[^/]*', #prefix + 1)
    names[#names + 1] = name
    -- '0' comes right after '/'.
    from = '[' .. prefix .. name .. '0'
  end
end

-- A source is a range of a sorted set, all of one queue and in the order of claims.
local function add_source(set, prefix, queue, is_suspect, gate)
  sources[#sources + 1] = {
    set = set, prefix = prefix, queue = queue, is_suspect = is_suspect, gate = gate,
    from = '[' .. prefix, to = '(' .. string.sub(prefix, 1, -2) .. '0', page = {}, position = 1,
  }
end

local function add_queues(set, is_suspect, queues, is_paused)
  for _, queue in ipairs(queues or names_after(set, '')) do
    if not is_paused[queue] then add_source(set, queue .. '/', queue, is_suspect) end
  end
end

local function conditions_of(id)
  local known = redis.call('HGET', conditions, id)
  return known and cmsgpack.unpack(known) or { '', {} }
end

-- The gate of that key that the first task under `prefix` has to pass.
local function first_gate(prefix, key)
  local first = redis.call('ZRANGEBYLEX', parked, '[' .. prefix, '+', 'LIMIT', 0, 1)[1]
  local id = string.match(first, '/([^/]*)$')
  for _, gate in ipairs(conditions_of(id)[2]) do
    if gate[1] == key then return gate end
  end
end

-- Add the parked tasks whose gate has room again. They stay parked until they are taken: a task that
-- this claim cannot take does not use the room.
local function add_parked(queues, is_paused)
  local is_claimed_from = nil
  if queues then
    is_claimed_from = {}
    for _, queue in ipairs(queues) do is_claimed_from[queue] = true end
  end
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', blocked, '-inf', now)) do
    local key = gate_key(name)
    local suspect_flags = names_after(parked, name .. '/')
    if #suspect_flags == 0 then redis.call('ZREM', blocked, name) end
    for _, suspect in ipairs(suspect_flags) do
      for _, queue in ipairs(names_after(parked, name .. '/' .. suspect .. '/')) do
        local prefix = name .. '/' .. suspect .. '/' .. queue .. '/'
        local gate = first_gate(prefix, key)
        local state = gate_state(key)
        if gate and room(gate, state, now) == 0 then
          state.wake_at = ask_again_at(gate, state, now)
          is_changed[key] = true
        elseif not is_paused[queue] and (not is_claimed_from or is_claimed_from[queue]) then
          add_source(parked, prefix, queue, suspect == '1', gate)
        end
      end
    end
  end
end

-- The first remaining task of a source; nil when there is none, or none may be taken from it.
local function first_member(source, page_size)
  if source.is_suspect and not may_take_suspect then return nil end
  if source.gate then
    local state = gate_state(source.gate[1])
    if room(source.gate, state, now) == 0 then
      state.wake_at = ask_again_at(source.gate, state, now)
      is_changed[source.gate[1]] = true
      return nil
    end
  end
  if source.position > #source.page then
    if source.is_last then return nil end
    source.page = redis.call('ZRANGEBYLEX', source.set, source.from, source.to, 'LIMIT', 0, page_size)
    source.position = 1
    source.is_last = #source.page < page_size
    if #source.page == 0 then return nil end
    source.from = '(' .. source.page[#source.page]
  end
  return source.page[source.position]
end

-- The first of all remaining tasks, with its source, which moves on to its next one.
local function next_task(page_size)
  local best, best_order, best_member
  for position = #sources, 1, -1 do
    local source = sources[position]
    local member = first_member(source, page_size)
    if not member then
      table.remove(sources, position)
    elseif #sources == 1 then
      best, best_member = source, member
    else
      -- Digits only: they compare alike in every locale.
      local order = string.sub(member, #source.prefix + 1, #source.prefix + ORDER_LAST)
      if not best or order < best_order then best, best_order, best_member = source, order, member end
    end
  end
  if best then best.position = best.position + 1 end
  return best, best_member
end

-- Enter all gates of the task, or park it under the gate that blocks it.
local function enter_gates(id, queue, rest, task_gates, token, source, member)
  local gate = blocking(task_gates, now)
  if gate then
    local name = gate_name(gate[1])
    local place = 'p' .. queue .. '/' .. rest .. '/' .. name
    local suspect = string.sub(rest, SUSPECT_FLAG, SUSPECT_FLAG)
    remove(source.set, member)
    add(parked, name .. '/' .. suspect .. '/' .. queue .. '/' .. rest .. '/' .. id)
    put(places, id, place)
    redis.call('ZADD', blocked, gate_state(gate[1]).wake_at, name)
    parked_count = parked_count + 1
    return false
  end
  for _, each in ipairs(task_gates) do
    enter(each, gate_state(each[1]), id, token, now)
    is_changed[each[1]] = true
  end
  return true
end

-- Whether a candidate is to be claimed; if not, it is moved to the set where it belongs.
local function may_take(source, member, id, queue, token, expired)
  local start = #source.prefix
  local due = string.sub(member, start + DUE_FIRST, start + DUE_LAST)
  if string.byte(member, start + VISIBLE_FLAG) == ONE and due > due_by then
    -- Moved for a caller whose time was ahead of this caller's.
    if due > now_stamp then
      local kind = source.set == ready and 'r' or (source.set == suspects and 's' or 'p')
      remove(source.set, member)
      add(delayed, due .. kind .. member)
    end
    return false
  end
  if string.byte(member, start + CONDITIONS_FLAG) ~= ONE then return true end
  local expires, task_gates = unpack(conditions_of(id))
  if expires ~= '' and expires <= due_by then
    expired[#expired + 1] = id
    return false
  end
  local rest = string.sub(member, start + 1, -2 - #id)
  return enter_gates(id, queue, rest, task_gates, token, source, member)
end

-- Choose tasks in order up to the limit: { id, place, source, member, queue, status } each; also the ids
-- of expired tasks; and the source, if the chosen tasks are one range of it without a gap.
local function choose(limit, holder)
  local chosen, expired, only_source = {}, {}, sources[1]
  local page_size = #sources == 1 and limit or math.max(2, math.ceil(2 * limit / math.max(1, #sources)))
  while #chosen < limit and parked_count < PARKED_PER_CALL and #expired < EXPIRED_PER_CALL do
    local source, member = next_task(page_size)
    if not source then break end
    local start, queue = #source.prefix, source.queue
    local slash = string.find(member, '/', start + TOKEN_FIRST, true)
    local token, id = string.sub(member, start + TOKEN_FIRST, slash - 1) + 1, string.sub(member, slash + 1)
    if may_take(source, member, id, queue, token, expired) then
      -- Running, with the other flags as they were, and not ended by an outcome.
      local flags = 'r' .. string.sub(member, start + VISIBLE_FLAG, start + CANCEL_FLAG) .. '0'
      local order = string.sub(member, start + 1, start + ORDER_LAST)
      local place = 'h' .. queue .. '/' .. order .. flags .. token .. '/' .. holder
      local status = string.sub(member, start + STATUS_AT, start + STATUS_AT)
      chosen[#chosen + 1] = { id, place, source, member, queue, status }
      if source.is_suspect then may_take_suspect = false end
      if source ~= only_source then only_source = nil end
    else
      only_source = nil
    end
  end
  return chosen, expired, only_source
end

-- Remove the chosen tasks from the sets where they waited.
local function remove_chosen(chosen, only_source)
  if #chosen == 0 then return end
  if only_source then
    redis.call('ZREMRANGEBYLEX', only_source.set, '[' .. chosen[1][4], '[' .. chosen[#chosen][4])
    return
  end
  local removed = {}
  for _, each in ipairs(chosen) do table.insert(table_of(removed, each[3].set), each[4]) end
  for set, removed_members in pairs(removed) do call_all('ZREM', set, removed_members) end
end

-- Store that the owner holds the chosen tasks; returns place, id, record and state of each.
local function hold(chosen, owner)
  local chosen_ids, answer = {}, {}
  for position, each in ipairs(chosen) do chosen_ids[position] = each[1] end
  local records, chosen_states = get_all(tasks, chosen_ids), get_all(states, chosen_ids)
  local new_places, held_members = {}, {}
  for position, each in ipairs(chosen) do
    local id, place, source, _, queue, status = unpack(each)
    add_to_count(queue, status, -1)
    if records[position] then
      local last, size = #new_places, #answer
      new_places[last + 1], new_places[last + 2] = id, place
      held_members[last + 1], held_members[last + 2] = 0, owner .. (source.is_suspect and '/1/' or '/0/') .. id
      add_to_count(queue, 'r', 1)
      answer[size + 1], answer[size + 2] = place, id
      answer[size + 3], answer[size + 4] = records[position], chosen_states[position] or ''
    else
      -- Its record was deleted by hand.
      drop(places, id)
      remove(ids, id)
    end
  end
  call_all('HSET', places, new_places)
  call_all('ZADD', held, held_members)
  return answer
end

-- The tasks that the owner holds by that claim: place, id, record and state of each.
local function held_by_claim(owner, claim_id)
  local owner_ids, answer = {}, {}
  local from, to = '[' .. owner .. '/', '(' .. owner .. '0'
  for position, member in ipairs(redis.call('ZRANGEBYLEX', held, from, to)) do
    owner_ids[position] = string.match(member, '/([^/]*)$')
  end
  for position, place in ipairs(get_all(places, owner_ids)) do
    if place and string.match(place, HELD_CLAIM_ID) == claim_id then
      local id = owner_ids[position]
      for _, value in ipairs({
        place, id, redis.call('HGET', tasks, id) or '', redis.call('HGET', states, id) or '',
      }) do
        answer[#answer + 1] = value
      end
    end
  end
  return answer
end

-- When, in microseconds, a task may become claimable by time alone, as a stamp; '' when none will.
local function next_event()
  local first = redis.call('ZRANGEBYLEX', delayed, '-', '+', 'LIMIT', 0, 1)[1]
  local next_gate = redis.call(
    'ZRANGEBYSCORE', blocked, string.format('(%.0f', now), '(' .. FOREVER, 'WITHSCORES', 'LIMIT', 0, 1
  )
  local opens = next_gate[2] and stamp(next_gate[2]) or ''
  local due = first and string.sub(first, 1, STAMP_SIZE) or ''
  if opens == '' or (due ~= '' and due < opens) then return due end
  return opens
end

-- `wanted` is { limit, due by (a stamp, '' for now), queues (0 for all), claim id, whether the caller chose
-- the claim id, channel, interest }. Returns the claimed tasks, the ids of expired ones, whether to call
-- again, and the next event.
local function claim(owner, wanted)
  local limit, queues, claim_id, channel = wanted[1], wanted[3] ~= 0 and wanted[3], wanted[4], wanted[6]
  due_by = wanted[2] ~= '' and wanted[2] or now_stamp
  if is_repeat or wanted[5] == 1 then
    local known = held_by_claim(owner, claim_id)
    if #known > 0 then return known, {}, 0, '' end
  end
  if not move_due() then return {}, {}, 1, '' end
  sources, parked_count = {}, 0
  local is_paused = {}
  for _, queue in ipairs(redis.call('SMEMBERS', paused_queues)) do is_paused[queue] = true end
  add_queues(ready, false, queues, is_paused)
  local held_suspects = '[' .. owner .. '/1/'
  may_take_suspect = redis.call('ZLEXCOUNT', held, held_suspects, '(' .. owner .. '/10') == 0
  if may_take_suspect then add_queues(suspects, true, queues, is_paused) end
  add_parked(queues, is_paused)
  local holder = owner .. '/' .. string.format('%.0f', now) .. '/' .. claim_id
  local chosen, expired, only_source = choose(limit, holder)
  remove_chosen(chosen, only_source)
  local answer = hold(chosen, owner)
  flush()
  flush_gates()
  if #chosen == limit then return answer, expired, 0, '' end
  if parked_count >= PARKED_PER_CALL or #expired >= EXPIRED_PER_CALL then return answer, expired, 1, '' end
  -- In the same step as the search: a task that arrives from now on finds this worker waiting.
  if channel ~= '' then redis.call('HSET', idle, channel, wanted[7]) end
  return answer, expired, 0, next_event()
end
