-- The claim: promote what came due, ask the gates, take the first tasks in order.
-- keys: places tasks states ids ready suspects parked delayed held terms paused blocked idle
local PROMOTED_AT_ONCE = 1000
local LOOKED_AT = 2000 -- tasks that one call may park or find expired before it answers
local EXPIRED_AT_ONCE = 200
local ONE = string.byte('1')

local sources, takes_suspects, due_by, looked_at

-- Move what has come due to where a claim looks; false when there is more of it.
local function promote()
  local due = redis.call('ZRANGEBYLEX', delayed, '-', '[' .. due_by .. '\255', 'LIMIT', 0, PROMOTED_AT_ONCE)
  for _, member in ipairs(due) do
    local kind, waiting = string.sub(member, 19, 19), string.sub(member, 20)
    remove(delayed, member)
    add(waiting_set(kind), waiting)
    if kind == 'p' then redis.call('ZADD', blocked, 'NX', 0, string.match(waiting, '^[^/]*')) end
  end
  if #due > 0 then flush() end
  -- Claiming now could take a task before one of higher priority that is not moved yet.
  return #due < PROMOTED_AT_ONCE
end

-- The first parts of members up to the slash that follows `prefix`, each once, in order.
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

local function add_source(set, prefix, queue, is_suspect, gate)
  sources[#sources + 1] = {
    set = set, prefix = prefix, queue = queue, is_suspect = is_suspect, gate = gate,
    from = '[' .. prefix, to = '(' .. string.sub(prefix, 1, -2) .. '0', page = {}, position = 1,
  }
end

local function add_queues(set, is_suspect, wanted, is_paused)
  for _, queue in ipairs(wanted or names_after(set, '')) do
    if not is_paused[queue] then add_source(set, queue .. '/', queue, is_suspect) end
  end
end

local function terms_of(id)
  local known = redis.call('HGET', terms, id)
  return known and cmsgpack.unpack(known) or { '', {} }
end

-- The gate of that key that the first task under `prefix` has to pass.
local function first_gate(prefix, key)
  local first = redis.call('ZRANGEBYLEX', parked, '[' .. prefix, '+', 'LIMIT', 0, 1)[1]
  local id = string.match(first, '/([^/]*)$')
  for _, gate in ipairs(terms_of(id)[2]) do
    if gate[1] == key then return gate end
  end
end

-- Look where tasks are parked whose gate has room again. They take part as they are: one that this
-- claim cannot take keeps nobody out of the room.
local function add_lots(wanted, is_paused)
  local asked = nil
  if wanted then
    asked = {}
    for _, queue in ipairs(wanted) do asked[queue] = true end
  end
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', blocked, '-inf', now)) do
    local key = gate_key(name)
    local flags = names_after(parked, name .. '/')
    if #flags == 0 then redis.call('ZREM', blocked, name) end
    for _, suspect in ipairs(flags) do
      for _, queue in ipairs(names_after(parked, name .. '/' .. suspect .. '/')) do
        local prefix = name .. '/' .. suspect .. '/' .. queue .. '/'
        local gate = first_gate(prefix, key)
        local state = gate_state(key)
        if gate and room(gate, state, now) == 0 then
          state.wake_at = ask_again_at(gate, state, now)
          is_changed[key] = true
        elseif not is_paused[queue] and (not asked or asked[queue]) then
          add_source(parked, prefix, queue, suspect == '1', gate)
        end
      end
    end
  end
end

-- The first task of a source that is left; nil when there is none, or none may be taken from it.
local function head(source, page_size)
  if source.is_suspect and not takes_suspects then return nil end
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

-- Take the first of all tasks that are left out of its source.
local function next_task(page_size)
  local best, best_order, best_member
  for position = #sources, 1, -1 do
    local source = sources[position]
    local member = head(source, page_size)
    if not member then
      table.remove(sources, position)
    elseif #sources == 1 then
      best, best_member = source, member
    else
      -- Digits only: they compare alike in every locale.
      local order = string.sub(member, #source.prefix + 1, #source.prefix + 54)
      if not best or order < best_order then best, best_order, best_member = source, order, member end
    end
  end
  if best then best.position = best.position + 1 end
  return best, best_member
end

-- Let the task through all its gates, or park it under the one that blocks.
local function pass_gates(id, queue, rest, asked, token, source, member)
  local gate = blocking(asked, now)
  if gate then
    local name = gate_name(gate[1])
    local place = 'p' .. queue .. '/' .. rest .. '/' .. name
    remove(source.set, member)
    add(parked, name .. '/' .. string.sub(rest, 58, 58) .. '/' .. queue .. '/' .. rest .. '/' .. id)
    put(places, id, place)
    redis.call('ZADD', blocked, gate_state(gate[1]).wake_at, name)
    looked_at = looked_at + 1
    return false
  end
  for _, each in ipairs(asked) do
    enter(each, gate_state(each[1]), id, token, now)
    is_changed[each[1]] = true
  end
  return true
end

-- Whether a candidate is to be claimed; if not, it is put where it belongs instead.
local function may_take(source, member, id, queue, token, expired)
  local start = #source.prefix
  local due = string.sub(member, start + 21, start + 38)
  if string.byte(member, start + 56) == ONE and due > due_by then
    -- Promoted for a caller whose time was ahead of this one's.
    if due > now_stamp then
      local kind = source.set == ready and 'r' or (source.set == suspects and 's' or 'p')
      remove(source.set, member)
      add(delayed, due .. kind .. member)
    end
    return false
  end
  if string.byte(member, start + 57) ~= ONE then return true end
  local expires, asked = unpack(terms_of(id))
  if expires ~= '' and expires <= due_by then
    expired[#expired + 1] = id
    return false
  end
  local rest = string.sub(member, start + 1, -2 - #id)
  return pass_gates(id, queue, rest, asked, token, source, member)
end

-- Take tasks in order until there are enough: { id, place, source, member, queue, status } each; the
-- ids of those that have expired instead; and the source, if they are one run of it without a gap.
local function take(limit, holder)
  local taken, expired, run = {}, {}, sources[1]
  local page_size = #sources == 1 and limit or math.max(2, math.ceil(2 * limit / math.max(1, #sources)))
  while #taken < limit and looked_at < LOOKED_AT and #expired < EXPIRED_AT_ONCE do
    local source, member = next_task(page_size)
    if not source then break end
    local start, queue = #source.prefix, source.queue
    local slash = string.find(member, '/', start + 61, true)
    local token, id = string.sub(member, start + 61, slash - 1) + 1, string.sub(member, slash + 1)
    if may_take(source, member, id, queue, token, expired) then
      local flags = 'r' .. string.sub(member, start + 56, start + 59) .. '0'
      local order = string.sub(member, start + 1, start + 54)
      local place = 'h' .. queue .. '/' .. order .. flags .. token .. '/' .. holder
      taken[#taken + 1] = { id, place, source, member, queue, string.sub(member, start + 55, start + 55) }
      if source.is_suspect then takes_suspects = false end
      if source ~= run then run = nil end
    else
      run = nil
    end
  end
  return taken, expired, run
end

-- Remove the taken tasks from where they waited.
local function take_out(taken, run)
  if #taken == 0 then return end
  if run then
    redis.call('ZREMRANGEBYLEX', run.set, '[' .. taken[1][4], '[' .. taken[#taken][4])
    return
  end
  local gone = {}
  for _, each in ipairs(taken) do table.insert(table_of(gone, each[3].set), each[4]) end
  for set, members_gone in pairs(gone) do call_all('ZREM', set, members_gone) end
end

-- Hand the taken tasks to the owner: place, id, record and state of each.
local function hand_over(taken, owner)
  local asked, answer = {}, {}
  for position, each in ipairs(taken) do asked[position] = each[1] end
  local records, changed = get_all(tasks, asked), get_all(states, asked)
  local at, holds = {}, {}
  for position, each in ipairs(taken) do
    local id, place, source, _, queue, status = unpack(each)
    count(queue, status, -1)
    if records[position] then
      local last, size = #at, #answer
      at[last + 1], at[last + 2] = id, place
      holds[last + 1], holds[last + 2] = 0, owner .. (source.is_suspect and '/1/' or '/0/') .. id
      count(queue, 'r', 1)
      answer[size + 1], answer[size + 2] = place, id
      answer[size + 3], answer[size + 4] = records[position], changed[position] or ''
    else
      -- Its record was deleted by hand.
      drop(places, id)
      remove(ids, id)
    end
  end
  call_all('HSET', places, at)
  call_all('ZADD', held, holds)
  return answer
end

-- What the owner holds by that claim: place, id, record and state of each.
local function held_by_claim(owner, claim_id)
  local asked, mine = {}, {}
  local from, to = '[' .. owner .. '/', '(' .. owner .. '0'
  for position, member in ipairs(redis.call('ZRANGEBYLEX', held, from, to)) do
    asked[position] = string.match(member, '/([^/]*)$')
  end
  for position, place in ipairs(get_all(places, asked)) do
    if place and string.match(place, '^h[^/]*/[^/]*/[^/]*/%d+/(.*)$') == claim_id then
      mine[#mine + 1] = { asked[position], place }
    end
  end
  local answer = {}
  for _, each in ipairs(mine) do
    for _, value in ipairs({
      each[2], each[1], redis.call('HGET', tasks, each[1]) or '', redis.call('HGET', states, each[1]) or '',
    }) do
      answer[#answer + 1] = value
    end
  end
  return answer
end

-- When, in microseconds, something may become claimable by time alone; '' when nothing will.
local function next_event()
  local first = redis.call('ZRANGEBYLEX', delayed, '-', '+', 'LIMIT', 0, 1)[1]
  local asleep = redis.call(
    'ZRANGEBYSCORE', blocked, string.format('(%.0f', now), '(' .. FOREVER, 'WITHSCORES', 'LIMIT', 0, 1
  )
  local opens = asleep[2] and stamp(asleep[2]) or ''
  local due = first and string.sub(first, 1, 18) or ''
  if opens == '' or (due ~= '' and due < opens) then return due end
  return opens
end

-- { limit, due by (a stamp, '' for now), queues (0 for all), claim, is known, channel, interest }
-- gives what was taken, the ids of the expired, whether to ask again, and the next event.
local function claim(owner, wish)
  local limit, wanted, claim_id, channel = wish[1], wish[3] ~= 0 and wish[3], wish[4], wish[6]
  due_by = wish[2] ~= '' and wish[2] or now_stamp
  if is_repeat or wish[5] == 1 then
    local known = held_by_claim(owner, claim_id)
    if #known > 0 then return known, {}, 0, '' end
  end
  if not promote() then return {}, {}, 1, '' end
  sources, looked_at = {}, 0
  local is_paused = {}
  for _, queue in ipairs(redis.call('SMEMBERS', paused)) do is_paused[queue] = true end
  add_queues(ready, false, wanted, is_paused)
  local own = '[' .. owner .. '/1/'
  takes_suspects = redis.call('ZLEXCOUNT', held, own, '(' .. owner .. '/10') == 0
  if takes_suspects then add_queues(suspects, true, wanted, is_paused) end
  add_lots(wanted, is_paused)
  local taken, expired, run = take(limit, owner .. '/' .. string.format('%.0f', now) .. '/' .. claim_id)
  take_out(taken, run)
  local answer = hand_over(taken, owner)
  flush()
  flush_gates()
  if #taken == limit then return answer, expired, 0, '' end
  if looked_at >= LOOKED_AT or #expired >= EXPIRED_AT_ONCE then return answer, expired, 1, '' end
  -- In the same step as the search: whatever comes from here on finds this worker waiting.
  if channel ~= '' then redis.call('HSET', idle, channel, wish[7]) end
  return answer, expired, 0, next_event()
end
