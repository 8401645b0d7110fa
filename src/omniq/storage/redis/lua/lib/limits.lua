-- Limits (gates of the kinds running and rate): the rules of gate_rules.py and gate_states.py, for claims and
-- outcomes that need no others. A test plays random games on two stores and compares this with the rules.
local FOREVER = 4611686018427387904 -- as gate_rules.FOREVER
local DUE_GATES = 100 -- that one call wakes, as gate_states.DUE_GATES
local SPECIAL = {}
local LONGEST_LOG = 1000 -- as in gate_rules
local OFFERED, FIRST_OFFERED = 100, 4 -- rows of each lot that are read, as in gate_states

-- key → { name of its document, state, rule (nil as long as no row of it was read), refills, is_changed, has_passed,
-- parks }. The fields of `state` are those of GateState, `rule` is a Gate.
local gates = {}

local function is_count(value)
  return type(value) == 'number' and value >= 0 and value < FOREVER and value % 1 == 0
end

-- Whether the engine can decode the gate too: a row whose gates it does not know would not leave them.
local function is_rule(value)
  -- Units, and the logs of high rates, need the rules.
  if type(value) ~= 'table' or value.cost ~= nil then return false end
  value.span = value.span or 0
  return type(value.key) == 'string' and is_count(value.size) and is_count(value.span)
    and (value.kind == 'running' or value.kind == 'rate' and value.size <= LONGEST_LOG)
end

-- The state of a gate; nil if it is damaged, and SPECIAL if it needs the rules (see `Special` in gate_rules).
local function unpack_state(data)
  local is_read, state = pcall(cmsgpack.unpack, data)
  -- It cannot read the bytes of `more`.
  if not is_read and string.find(data, '\164more', 1, true) then return SPECIAL end
  if not is_read or type(state) ~= 'table' then return nil end
  state.holders, state.starts = state.holders or {}, state.starts or {}
  state.wake_at, state.parks = state.wake_at or 0, state.parks or 0
  if type(state.holders) ~= 'table' or type(state.starts) ~= 'table' then return nil end
  for _, holder in ipairs(state.holders) do
    if type(holder) ~= 'table' or type(holder[2]) ~= 'number' then return nil end
  end
  for _, start in ipairs(state.starts) do
    if type(start) ~= 'number' then return nil end
  end
  return type(state.wake_at) == 'number' and type(state.parks) == 'number' and state or nil
end

local PACKED_FOREVER = cmsgpack.pack(FOREVER)

-- As the engine packs it: the fields in order, without those that have their defaults.
local function pack_state(state)
  local packed, size = '', 0
  if state.wake_at ~= 0 then
    local wake_at = state.wake_at == FOREVER and PACKED_FOREVER or cmsgpack.pack(state.wake_at)
    packed, size = packed .. '\167wake_at' .. wake_at, size + 1
  end
  if state.has_parked then packed, size = packed .. '\170has_parked\195', size + 1 end
  if state.parks ~= 0 then packed, size = packed .. '\165parks' .. cmsgpack.pack(state.parks), size + 1 end
  if #state.starts > 0 then packed, size = packed .. '\166starts' .. cmsgpack.pack(state.starts), size + 1 end
  if #state.holders > 0 then packed, size = packed .. '\167holders' .. cmsgpack.pack(state.holders), size + 1 end
  return string.char(128 + size) .. packed
end

-- Read the gates with these keys that are not read yet. False if one is damaged or a breaker: it needs the rules.
local function read_gates(keys)
  local names, unread = {}, {}
  for _, key in ipairs(keys) do
    if not gates[key] then
      gates[key] = { name = 'gate/' .. key }
      names[#names + 1], unread[#unread + 1] = gates[key].name, key
    end
  end
  for position, value in ipairs(get_all(KEYS.documents, names)) do
    local gate = gates[unread[position]]
    local _, data = split_document(value or '/\128')
    stored_documents[gate.name] = value
    gate.state = string.sub(unread[position], 1, 8) ~= 'breaker:' and unpack_state(data)
    if gate.state == SPECIAL then gate.state, gate.is_special = false, true end
  end
  for _, key in ipairs(keys) do
    if not gates[key].state then return false end
  end
  return true
end

-- The number of sorted values below a bound.
local function count_below(values, bound)
  local low, high = 0, #values
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if values[middle] < bound then low = middle else high = middle - 1 end
  end
  return low
end

local function room_in(rule, state)
  if rule.kind == 'running' then return math.max(0, rule.size - #state.holders) end
  return math.max(0, rule.size - count_below(state.starts, now + rule.span) + count_below(state.starts, now - rule.span + 1))
end

local function ask_again_at(rule, state)
  if rule.kind == 'rate' and #state.starts >= rule.size then
    return state.starts[#state.starts - rule.size + 1] + rule.span
  end
  return FOREVER
end

-- Whether the outcomes of rows with these limits need the rules: a limit counts units, or an operator has changed it.
local function need_rules(limits)
  local keys, is_special = {}, false
  for position, limit in ipairs(limits) do keys[position] = limit[1] end
  read_gates(keys)
  for _, key in ipairs(keys) do is_special = is_special or gates[key].is_special end
  return is_special
end

-- Claims with these tokens (by the ids of their rows) leave a gate, which has been read.
local function leave(rule, tokens)
  local gate = gates[rule.key]
  local state = gate.state or unpack_state('\128')
  gate.state, gate.rule, gate.is_changed = state, rule, true
  gate.refills = state.has_parked
  if rule.kind ~= 'running' then return end
  local left = {}
  for _, holder in ipairs(state.holders) do
    if tokens[holder[1]] ~= holder[2] then left[#left + 1] = holder end
  end
  state.holders, state.wake_at = left, 0
end

-- The gates of a row; false if they are damaged. Most rows have the same as the one before.
local known_rules, last_record = {}, { start = '/' }

local function rules_in(state)
  local rules = known_rules[state]
  if rules == nil then
    local is_read, fields = pcall(cmsgpack.unpack, state)
    rules = is_read and type(fields) == 'table' and type(fields.gates) == 'table' and fields.gates or false
    for _, rule in ipairs(rules or {}) do
      if not is_rule(rule) then rules = false end
    end
    known_rules[state] = rules
  end
  return rules
end

local function rules_of(record, state)
  if state ~= '' then return rules_in(state) end
  local start = last_record.start
  if string.sub(record, 1, #start) ~= start then
    local state_start
    start, state_start = without_body(record)
    last_record = { start = start, rules = rules_in(string.sub(start, state_start)) }
  end
  return last_record.rules
end

-- As `encoding.gate_name`.
local function name_of(key)
  if not string.find(key, '[%%/]') then return key end
  return (string.gsub(string.gsub(key, '%%', '%%25'), '/', '%%2F'))
end

-- Note that a row is parked under a gate; returns the name of the gate.
local function park(rule)
  local gate = gates[rule.key]
  local state = gate.state
  -- Always a change of the state: a section that has read it does not know of this row.
  if not gate.parks then state.parks = state.parks + 1 end
  gate.rule, gate.is_changed, gate.parks = rule, true, true
  state.has_parked, state.wake_at = true, ask_again_at(rule, state)
  return name_of(rule.key)
end

-- Park a row under the gate that has no room, and return its name; '' if all have, nil if the row needs the rules.
local function blocking(rules)
  local is_blocked = false
  if not rules.are_read then
    local keys = {}
    for position, rule in ipairs(rules) do keys[position] = rule.key end
    if not read_gates(keys) then return nil end
    rules.are_read = true
  end
  for _, rule in ipairs(rules) do
    local state = gates[rule.key].state
    local last = state.starts[#state.starts]
    if last and last > now then return nil end
    is_blocked = is_blocked or room_in(rule, state) == 0
  end
  if not is_blocked then return '' end
  -- Its other gates would have to offer its room to others.
  return #rules == 1 and park(rules[1]) or nil
end

local function enter(rules, id, token)
  for _, rule in ipairs(rules) do
    local gate = gates[rule.key]
    local state = gate.state
    gate.rule, gate.is_changed, gate.has_passed = rule, true, false
    if rule.kind == 'running' then
      state.holders[#state.holders + 1] = { id, token }
    else
      state.starts[#state.starts + 1] = now
      while #state.starts > rule.size do table.remove(state.starts, 1) end
    end
    if state.has_parked and room_in(rule, state) == 0 then state.wake_at = ask_again_at(rule, state) end
  end
end

-- The keys of gates whose time has come, DUE_GATES at most.
local function due_gates()
  local keys = redis.call('ZRANGEBYLEX', KEYS.document_dues, '[gate/', '(gate/' .. now_stamp .. '0', 'LIMIT', 0, DUE_GATES)
  for position, member in ipairs(keys) do keys[position] = string.match(member, '^gate/%d+/(.*)$') end
  return keys
end

-- Have `offer` refill these gates; false if that needs the rules.
local function wake_gates(keys)
  if not read_gates(keys) then return false end
  for _, key in ipairs(keys) do
    local gate = gates[key]
    gate.is_changed = true
    gate.refills = gate.state.has_parked
    gate.has_passed = not gate.state.has_parked
  end
  return true
end

-- Offer the room of gates to their first parked rows. Adds to `offered`, by id, what becomes of each: its lane, its
-- new place, its member of `parked`, and that of `ready`. They are not written yet. Returns false if a gate needs
-- the rules, because its rule cannot be read.
local function offer(offered)
  local found, members, ids, firsts, first_ids, are_known = {}, {}, {}, {}, {}, true
  for key, gate in pairs(gates) do
    local room = gate.refills and (gate.rule and room_in(gate.rule, gate.state) or FIRST_OFFERED) or 0
    gate.refills = nil
    if room > 0 then
      local limit = FIRST_OFFERED
      if gate.rule then limit = math.min(room + (gate.rule.kind == 'running' and 0 or 1), OFFERED) end
      local first, name = #ids + 1, name_of(key)
      add_parked(members, ids, name, limit)
      found[#found + 1] = { gate, name, limit, first, #ids }
      if not gate.rule and ids[first] then firsts[#firsts + 1], first_ids[#first_ids + 1] = gate, ids[first] end
    end
  end
  local records, states, places = get_all(KEYS.tasks, first_ids), get_all(KEYS.states, first_ids), get_all(KEYS.places, ids)
  for position, gate in ipairs(firsts) do
    for _, rule in ipairs(rules_of(records[position] or '', states[position] or '') or {}) do
      if gate.name == 'gate/' .. rule.key then gate.rule = rule end
    end
    gate.is_new = gate.rule
  end
  local is_again = false
  for _, each in ipairs(found) do
    local gate, name, limit, first, last = unpack(each)
    local state, rule = gate.state, gate.rule
    local room, has_more, lot, count = rule and room_in(rule, state) or 0, false, nil, 0
    are_known = are_known and (rule or first > last)
    -- Again if its first rows show that it has room for more of them.
    gate.refills = gate.is_new and room > limit and limit <= last - first + 1
    gate.is_new, is_again = nil, is_again or gate.refills
    for position = first, gate.refills and 0 or last do
      local member, place = members[position], places[position] or ''
      -- Its place in the ready order ends like that of most others.
      place = string.sub(place, KIND, KIND) == 'p' and string.sub(place, -#name) == name and 'w' .. string.sub(place, STATUS, -#name - 1)
      local known = place and end_of_place(place)
      local lane = known and known.lane
      if lane ~= lot then lot, count = lane, 0 end
      count = count + 1
      has_more = has_more or count == limit or count > room
      if known and count <= room then
        offered[ids[position]] = { lane = lane, place = place, parked = member, ready = string.sub(member, #name + 2) }
      end
    end
    if gate.refills then
      -- Its state follows from those rows.
    elseif first > last then
      state.has_parked = false
    elseif room == 0 then
      state.wake_at = rule and ask_again_at(rule, state) or state.wake_at
    elseif room > limit and has_more then
      state.wake_at = now
    else
      -- What was offered will enter, and then the gate has no room, or refill the gate.
      state.wake_at, state.has_parked = FOREVER, has_more
    end
  end
  if is_again then return offer(offered) and are_known end
  return are_known
end

local function write_gates()
  for _, gate in pairs(gates) do
    if gate.is_changed then
      local state, due, data = gate.state, '', nil
      local last = state.starts[#state.starts]
      local says_nothing = #state.holders == 0 and not state.has_parked and (not last or gate.has_passed)
      if not says_nothing then
        data = pack_state(state)
        if state.has_parked then
          if state.wake_at < FOREVER then due = '10' .. string.format('%016.0f', state.wake_at) end
        elseif last then
          due = gate.rule and '10' .. string.format('%016.0f', last + gate.rule.span) or split_document(stored_documents[gate.name] or '')
        end
      end
      apply_document({ gate.name, 0, '', data and 1 or 0, data or '', due })
      gate.is_changed = false
    end
  end
end
