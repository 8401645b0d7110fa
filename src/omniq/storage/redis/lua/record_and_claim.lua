-- Records plain outcomes, then claims plain rows: one round trip of a worker.
-- uses: request writes wakeups results places lanes task_sets rows documents changes held candidates
-- request   3 owner, 4 groups of endings, 5 other outcomes, 6 unique keys that end with their tasks
--           (see lib/documents), 7 what to claim or 0
--           a group is { queue, function, status, when it finished, when its record expires (0 stores
--           none), { id, token, record at its end, … } }
--           an outcome is { id, token, new place, state }
--           the claim is { limit, due by or '', queues or 0, runnable (see lib/candidates), claim id,
--           channel or '', interest, whether the caller chose the claim id }
-- returns   'lost' when the owner has no lease and wants to claim; else now, the ids of rows that have
--           changed since they were claimed, the claimed rows (0 if the claim needs the rules, or if rows
--           have changed), and the next event
local owner, groups, outcomes, keys, wanted = request[3], request[4], request[5], request[6], request[7]
local is_leased = redis.call('ZSCORE', KEYS.leases, owner)
if wanted ~= 0 and not is_leased then return 'lost' end

-- A script that has removed something may also write when memory is full: then running tasks can finish.
redis.call('HDEL', KEYS.idle, wanted ~= 0 and wanted[6] or '')

local missed, is_missed, ended_ids = {}, {}, {}

local function miss(id)
  missed[#missed + 1] = id
  is_missed[id] = true
end

-- Most outcomes: held rows end that have nothing else. A group takes few commands.
local function end_group(group)
  local queue, func, status, finished_at, expires_at, list = unpack(group)
  -- Held, running, not cancelled, and nothing attached.
  local head, tail = 'hr00', '/' .. finished_at .. '/' .. expires_at
  local row_ids, new_places, released, records, index, dropped = {}, {}, {}, {}, {}, {}
  for position = 1, #list, 3 do row_ids[#row_ids + 1] = list[position] end
  local known, name, holder = get_all(KEYS.places, row_ids), '/' .. queue .. '/' .. func .. '/', owner .. '/'
  for position, id in ipairs(row_ids) do
    local place, token, record = known[position], list[3 * position - 1], list[3 * position]
    local start, expires, tail_at = token .. name, nil, nil
    if place and string.sub(place, 1, #head) == head
      and string.sub(place, FIXED_LAST + 1, FIXED_LAST + #start) == start then
      expires, tail_at = string.match(place, '^(%d*)/()', FIXED_LAST + #start + 1)
    end
    if tail_at and string.sub(place, tail_at, tail_at + #owner) == holder then
      ended_ids[#ended_ids + 1] = id
      released[#released + 1] = owner .. '/' .. string.sub(place, SUSPECT, SUSPECT) .. '/' .. id
      if expires_at == '0' then
        dropped[#dropped + 1] = id
      else
        local size = #records
        local kept = string.sub(place, STATUS + 1, FIXED_LAST + #start)
        new_places[size + 1], new_places[size + 2] = id, 'f' .. status .. kept .. expires .. tail
        records[size + 1], records[size + 2] = id, record
        index[size + 1], index[size + 2] = expires_at, finished_at .. '/' .. id
      end
    elseif not (is_repeat and (place and string.sub(place, -#tail) or '/gone') == (expires_at == '0' and '/gone' or tail)) then
      miss(id)
    end
  end
  add_to_count(queue, 'r', -#released)
  call_all('ZREM', KEYS.held, released)
  call_all('HSET', KEYS.places, new_places)
  call_all('HSET', KEYS.ended, records)
  call_all('ZADD', FINISHED_SETS[status], index)
  call_all('HDEL', KEYS.places, dropped)
  call_all('HDEL', KEYS.tasks, dropped)
  call_all('ZREM', KEYS.ids, dropped)
end

local function apply_outcome(id, place, token, new_place, state)
  local known_token, _, _, _, tail = split_place(place or '')
  if place and string.sub(place, CANCELLED, ATTACHED) == '00' and known_token == token
    and string.sub(place, KIND, KIND) == 'h' and string.match(tail, '^[^/]*') == owner then
    move_row(id, place, new_place, state, '', '', 0)
  elseif not (is_repeat and place == new_place) then
    miss(id)
  end
end

for _, group in ipairs(groups) do end_group(group) end
if #ended_ids > 0 and redis.call('EXISTS', KEYS.states) == 1 then call_all('HDEL', KEYS.states, ended_ids) end
for _, outcome in ipairs(outcomes) do
  local id, token, place, state = unpack(outcome)
  apply_outcome(id, redis.call('HGET', KEYS.places, id), token, place, state)
end
if #keys > 0 then
  read_documents(keys)
  for _, change in ipairs(keys) do
    if not is_missed[change[3]] then apply_document(change) end
  end
end
flush()
update_heads()
notify_ended(ended_ids)

-- The rows that this same call has claimed already: its reply was lost, or the caller repeats it.
local function held_by_claim(claim_id)
  local row_ids, answer = held_ids(owner), {}
  local row_places = get_all(KEYS.places, row_ids)
  for position, place in ipairs(row_places) do
    local _, _, _, _, tail = split_place(place or '')
    if not tail or string.match(tail, '^[^/]*/%d+/(.*)$') ~= claim_id then row_places[position] = false end
  end
  append_rows(answer, row_ids, row_places, true)
  return answer
end

local function is_plain(place, due_by)
  if not place or string.sub(place, VISIBLE_FIRST, VISIBLE_LAST) > due_by then return false end
  -- Most wait for their first run, and have none of the marks.
  if string.sub(place, KIND, EXPIRING) == 'wp00000' then return true end
  if string.sub(place, KIND, KIND) ~= 'w' then return false end
  local flags = string.sub(place, SUSPECT, EXPIRING)
  if flags == '000' then return true end
  if flags ~= '001' then return false end
  local _, _, _, expires = split_place(place)
  return expires > due_by
end

-- Remove the chosen members from the ready order.
local function remove_chosen(chosen, lanes)
  local last, is_one = nil, true
  for _, lane in ipairs(lanes) do
    if lane ~= last then
      change_lane(lane)
      is_one = is_one and not last
      last = lane
    end
  end
  if is_one then
    redis.call('ZREMRANGEBYLEX', KEYS.ready, '[' .. chosen[1], '[' .. chosen[#chosen])
  else
    call_all('ZREM', KEYS.ready, chosen)
  end
end

local function count_claimed(lanes, row_places)
  local last, status, number = nil, nil, 0
  for position = 1, #lanes + 1 do
    local place = row_places[position]
    local its_status = place and string.sub(place, STATUS, STATUS)
    if lanes[position] ~= last or its_status ~= status then
      if last then
        local queue = string.match(last, '^.([^/]*)')
        add_to_count(queue, status, -number)
        add_to_count(queue, 'r', number)
      end
      last, status, number = lanes[position], its_status, 0
    end
    number = number + 1
  end
end

-- Take the first rows if all of them are plain; 0 if the claim needs the rules.
local function claim()
  local limit, claim_id = wanted[1], wanted[5]
  local due_by = wanted[2] ~= '' and wanted[2] or now_stamp
  if is_repeat or wanted[8] == 1 then
    local known = held_by_claim(claim_id)
    if #known > 0 then return known, '' end
  end
  if #missed > 0 then return 0, '' end
  local gate = redis.call('ZRANGEBYLEX', KEYS.document_dues, '[gate/', '(gate/' .. now_stamp .. '0', 'LIMIT', 0, 1)
  if gate[1] or not move_due(due_by) then return 0, '' end
  local row_ids, chosen, lanes, asked = {}, {}, {}, { wanted[3], paused_queues(), wanted[4], 1 }
  begin_candidates(asked, '', limit)
  read_candidates(asked, '', limit, chosen, row_ids, lanes)
  local row_places, records, row_states = get_all(KEYS.places, row_ids), get_all(KEYS.tasks, row_ids), {}
  if #row_ids > 0 and redis.call('EXISTS', KEYS.states) == 1 then row_states = get_all(KEYS.states, row_ids) end
  local holder = owner .. '/' .. now_text .. '/' .. claim_id
  local new_places, held_members, answer = {}, {}, {}
  for position, id in ipairs(row_ids) do
    local place = row_places[position]
    if not records[position] or not is_plain(place, due_by) then return 0, '' end
    local token, middle = string.match(place, '^(%d+)(/.*)$', FIXED_LAST + 1)
    if not token then return 0, '' end
    local size, last = 2 * position, 4 * position
    place = 'hr' .. string.sub(place, STATUS + 1, FIXED_LAST) .. string.format('%.0f', token + 1) .. middle .. holder
    new_places[size - 1], new_places[size] = id, place
    held_members[size - 1], held_members[size] = 0, owner .. '/0/' .. id
    answer[last - 3], answer[last - 2] = id, place
    answer[last - 1], answer[last] = records[position], row_states[position] or ''
  end
  if #row_ids > 0 then
    remove_chosen(chosen, lanes)
    call_all('HSET', KEYS.places, new_places)
    call_all('ZADD', KEYS.held, held_members)
    count_claimed(lanes, row_places)
    flush()
    update_heads()
  end
  if #row_ids == limit then return answer, '' end
  return answer, wait_for_more(wanted[6], wanted[7])
end

local claimed, event = 0, ''
if wanted ~= 0 then claimed, event = claim() end
send_wakeups()
return { now_text, missed, claimed, event }
