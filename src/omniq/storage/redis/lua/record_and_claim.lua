-- Records plain outcomes, then claims rows that are plain or only limited: one round trip of a worker.
-- uses: request writes wakeups results places heads lanes task_sets rows documents changes endings holding held lease candidates parked limits
-- request   3 owner, 4 groups of endings (see lib/endings), 5 other outcomes, 6 unique keys that end with their tasks
--           (see lib/documents), 7 what to claim or 0, 8 the epoch and 9 the beat of the owner's lease, as
--           the owner knows it, 10 the id or '' and 11 the token of the owner's newest claim, 12 the limits
--           of the rows with outcomes: { key, kind, size, span, id, token, id, token, … }, 13 how many calls
--           of the owner have claimed, as it knows
--           an outcome is { id, token, new place, state }
--           the claim is { limit, due by or '', queues or 0, runnable (see lib/candidates), claim id,
--           channel or '', interest, whether the caller chose the claim id }
-- returns   'lost' when the owner has no lease and wants to claim; else now, the ids of rows that have
--           changed since they were claimed, the claimed rows, what is left to claim (NOTHING; SOME if this
--           took as long as one call may; BY_RULES if the rest needs the rules; or IS_BEHIND if the newest claim has a lower token
--           now), the next event, and how many calls of the owner have claimed, '' if this one has not
local NOTHING, SOME, BY_RULES, IS_BEHIND = 0, 1, 2, 3
local MAX_MOVES = 1000 -- rows that one call parks and claims, about
local LARGEST_PAGE = 500

local owner, groups, outcomes, keys, wanted, limits = request[3], request[4], request[5], request[6], request[7], request[12]
local first_token = request[8] * 2097152 -- of the epoch
if wanted ~= 0 and not has_lease(owner, request[8], request[9], request[13]) then return 'lost' end

-- A script that has removed something may also write when memory is full: then running tasks can finish.
redis.call('HDEL', KEYS.idle, wanted ~= 0 and wanted[6] or '')

local missed, is_missed, ended_ids, moved_ids = {}, {}, {}, {}

local function miss(id)
  missed[#missed + 1] = id
  is_missed[id] = true
end

-- Whether an earlier try of this call has ended the row.
local function was_ended(group, place)
  if not is_repeat then return false end
  if group[6] == '0' then return not place end
  local tail = '/' .. group[5] .. '/' .. group[6]
  return place and string.sub(place, -#tail) == tail
end

local function apply_outcome(id, place, token, new_place, state)
  local known_token, _, _, _, tail = split_place(place or '')
  if place and string.sub(place, CANCELLED, ATTACHED) == '00' and known_token == token
    and string.sub(place, KIND, KIND) == 'h' and string.match(tail, '^[^/]*') == owner then
    move_row(id, place, new_place, state, '', '', 0)
    moved_ids[#moved_ids + 1] = id
  elseif not (is_repeat and place == new_place) then
    miss(id)
  end
end

if #limits > 0 and need_rules(limits) then
  for _, group in ipairs(groups) do
    for _, id in ipairs((match_group(group, owner))) do miss(id) end
  end
  for _, outcome in ipairs(outcomes) do miss(outcome[1]) end
  return { now_text, missed, {}, BY_RULES, '', '' }
end
for _, group in ipairs(groups) do
  local row_ids, row_places, ends = match_group(group, owner)
  for position, id in ipairs(row_ids) do
    if not ends[position] and not was_ended(group, row_places[position]) then miss(id) end
  end
  end_group(group, owner, row_ids, row_places, ends, ended_ids)
end
drop_states(ended_ids)
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
-- The rows whose outcomes are recorded leave their limits.
if #limits > 0 then
  local is_recorded = {}
  for _, ids in ipairs({ ended_ids, moved_ids }) do
    for _, id in ipairs(ids) do is_recorded[id] = true end
  end
  for _, limit in ipairs(limits) do
    local tokens = {}
    for position = 5, #limit, 2 do
      if is_recorded[limit[position]] then tokens[limit[position]] = limit[position + 1] end
    end
    if next(tokens) then leave({ key = limit[1], kind = limit[2], size = limit[3], span = limit[4] }, tokens) end
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

local function is_claimable(place, due_by)
  if not place or string.sub(place, VISIBLE_FIRST, VISIBLE_LAST) > due_by then return false end
  -- Most wait for their first run, and have none of the marks, or only gates.
  local marks = string.sub(place, KIND, EXPIRING)
  if marks == 'wp00000' or marks == 'wp00010' then return true end
  if string.sub(place, KIND, KIND) ~= 'w' or string.sub(place, SUSPECT, SUSPECT) == '1' then return false end
  if string.sub(place, EXPIRING, EXPIRING) == '0' then return true end
  local _, _, _, expires = split_place(place)
  return expires > due_by
end

-- Remove rows from the ready order. `next_orders`: of lanes that were read further than these rows.
local function remove_ready_rows(row_members, row_lanes, next_orders)
  local last, is_one = nil, true
  for position, lane in ipairs(row_lanes) do
    if lane ~= last and lane_sources[lane] then
      local head = string.sub(row_members[position], #lane + 1, #lane + ORDER_SIZE)
      move_head(lane, head, next_orders[lane] or lane_sources[lane].order)
      lane_sources[lane] = nil
    end
    is_one = is_one and (not last or lane == last)
    last = lane
  end
  if is_one then
    -- Lanes were read from their heads.
    redis.call('ZREMRANGEBYLEX', KEYS.ready, '[' .. row_members[1], '[' .. row_members[#row_members])
  else
    call_all('ZREM', KEYS.ready, row_members)
  end
end

-- Parked rows that were offered room, and that this call has not taken (see lib/limits).
local offered = {}

-- Have `read_candidates` return the offered rows that the claim may take, each in its turn.
local function add_offered(paused)
  local by_lane = {}
  for _, each in pairs(offered) do
    local list = by_lane[each.lane]
    if list == nil then
      local queue, func = string.match(each.lane, '^.([^/]*)/([^/]*)/$')
      list = accepts(wanted[3], wanted[4], queue, func) and not has(paused, queue) and {}
      by_lane[each.lane] = list
    end
    if list then list[#list + 1] = each.ready end
  end
  for lane, list in pairs(by_lane) do
    if list then
      table.sort(list)
      add_members(lane, list)
    end
  end
end

-- Return the offered rows that are left to the ready order.
local function return_offered()
  for id, each in pairs(offered) do
    local queue, func = string.match(each.lane, '^.([^/]*)/([^/]*)/$')
    remove(KEYS.parked, each.parked)
    add(KEYS.ready, each.ready)
    put(KEYS.places, id, each.place)
    change_lane(each.lane, string.sub(each.place, ORDER_FIRST, ORDER_LAST))
    add_claimable(queue, func, 1)
  end
end

-- Take the first rows, up to the first that needs the rules. Returns them, and what is left to claim.
local function take_rows(limit, due_by, claim_id, paused)
  local asked, size, left, is_end = { wanted[3], paused, wanted[4], 1 }, limit, NOTHING, false
  local members, lanes, next_orders, parked_members, parked_places, entered = {}, {}, {}, {}, {}, {}
  local ids, places, records, states, ends, claimed_lanes = {}, {}, {}, {}, {}, {}
  local has_states, tail = redis.call('EXISTS', KEYS.states) == 1, owner .. '/' .. now_text .. '/' .. claim_id

  -- Claim a row, or park it; false if it needs the rules.
  local function take(id, place, record, state, member, lane)
    local known = record and is_claimable(place, due_by) and end_of_place(place)
    if not known then return false end
    local token = math.max(known.token + 1, first_token)
    if string.sub(place, GATED, GATED) == '1' then
      local rules = wanted[2] == '' and rules_of(record, state)
      local name = rules and (rules.blocked_by or blocking(rules))
      if not name then return false end
      if name ~= '' then
        -- Until the end of this call: room is offered before rows are taken.
        rules.blocked_by = name
        -- An offered row is still parked under its gate.
        if not offered[id] then
          local count = #parked_members
          parked_members[count + 1], parked_members[count + 2] = 0, name .. '/' .. member
          parked_places[count + 1], parked_places[count + 2] = id, 'p' .. string.sub(place, STATUS) .. name
        end
        return true
      end
      enter(rules, id, token)
    end
    if offered[id] then entered[#entered + 1] = offered[id].parked end
    local count = #ids + 1
    ids[count], places[count], records[count], states[count] = id, place, record, state
    ends[count], claimed_lanes[count] = held_end(known, token, tail), lane
    return true
  end

  begin_candidates(asked, '', limit)
  add_offered(asked[2])
  while #ids < limit and left == NOTHING and not is_end do
    local page_ids, page_members, page_lanes = {}, {}, {}
    read_candidates(asked, '', size, page_members, page_ids, page_lanes)
    is_end = #page_ids < size
    local page_places, page_records = get_all(KEYS.places, page_ids), get_all(KEYS.tasks, page_ids)
    local page_states = has_states and get_all(KEYS.states, page_ids) or {}
    for position, id in ipairs(page_ids) do
      local member, lane = page_members[position], page_lanes[position]
      local offer, place = offered[id], page_places[position]
      if offer then place = offer.place end
      if left == NOTHING and #ids < limit and take(id, place, page_records[position], page_states[position] or '', member, lane) then
        offered[id] = nil
        if not offer then members[#members + 1], lanes[#lanes + 1] = member, lane end
      else
        if #ids < limit then left = BY_RULES end
        if not offer then next_orders[lane] = next_orders[lane] or string.sub(member, #lane + 1, #lane + ORDER_SIZE) end
      end
    end
    if left == NOTHING and #ids < limit and #members >= MAX_MOVES and not is_end then left = SOME end
    -- Growing pages, because a page may consist of rows that one gate blocks.
    size = math.min(math.max(limit - #ids, 2 * size), LARGEST_PAGE)
  end

  if #members > 0 then remove_ready_rows(members, lanes, next_orders) end
  call_all('ZREM', KEYS.parked, entered)
  call_all('ZADD', KEYS.parked, parked_members)
  call_all('HSET', KEYS.places, parked_places)
  local held, answer = hold_rows(owner, ids, places, ends, claimed_lanes), {}
  for position, id in ipairs(ids) do
    local last = 4 * position
    answer[last - 3], answer[last - 2] = id, held[2 * position]
    local record, state = records[position], states[position]
    if #record + #state > LARGEST_VALUE then record = without_body(record) end
    answer[last - 1], answer[last] = record, fitting(state)
  end
  return answer, left
end

-- Write what `offer` and `take_rows` have collected.
local function write_claims()
  return_offered()
  offered = {}
  write_gates()
  flush()
  update_heads()
end

-- Returns rows, what is left to claim, and the next event.
local function claim()
  local limit, claim_id, due_by = wanted[1], wanted[5], wanted[2]
  if due_by == '' then due_by = now_stamp end
  if is_repeat or wanted[8] == 1 then
    local known = held_by_claim(claim_id)
    -- A claim that the caller named has no more rows. Another may, and the first try no longer waits for them.
    if #known > 0 then return known, (wanted[8] == 1 or #known == 4 * limit) and NOTHING or SOME, '' end
  end
  if #missed > 0 then return {}, BY_RULES, '' end
  local witness = request[10] ~= '' and redis.call('HGET', KEYS.places, request[10])
  if witness and string.sub(witness, KIND, KIND) ~= 'f' and (tonumber((split_place(witness))) or request[11]) < request[11] then
    return {}, IS_BEHIND, ''
  end
  local due, paused = due_gates(), paused_queues()
  for _, name in ipairs(paused) do
    -- A paused function.
    if string.sub(name, -2) == '()' then return {}, BY_RULES, '' end
  end
  if (#due > 0 and wanted[2] ~= '') or not wake_gates(due) or not move_due(due_by) then return {}, BY_RULES, '' end
  if not offer(offered) then return {}, BY_RULES, '' end
  local rows, left = take_rows(limit, due_by, claim_id, paused)
  write_claims()
  if #rows == 4 * limit or left ~= NOTHING then return rows, left, '' end
  if #due == DUE_GATES then return rows, SOME, '' end
  return rows, NOTHING, wait_for_more(wanted[6], wanted[7])
end

local claimed, left, event, claims = {}, NOTHING, '', ''
if wanted ~= 0 then claimed, left, event = claim() end
if #claimed > 0 then claims = redis.call('HINCRBY', KEYS.workers, owner .. '#', 1) end
offer(offered)
write_claims()
send_wakeups()
return { now_text, missed, claimed, left, event, claims }
