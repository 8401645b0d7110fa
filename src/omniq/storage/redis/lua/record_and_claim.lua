-- Records plain outcomes, then claims plain rows: one round trip of a worker.
-- uses: request writes wakeups results places heads lanes task_sets rows documents changes endings holding held lease candidates
-- request   3 owner, 4 groups of endings (see lib/endings), 5 other outcomes, 6 unique keys that end with their tasks
--           (see lib/documents), 7 what to claim or 0, 8 the epoch and 9 the beat of the owner's lease, as
--           the owner knows it, 10 the id or '' and 11 the token of the owner's newest claim
--           an outcome is { id, token, new place, state }
--           the claim is { limit, due by or '', queues or 0, runnable (see lib/candidates), claim id,
--           channel or '', interest, whether the caller chose the claim id }
-- returns   'lost' when the owner has no lease and wants to claim; else now, the ids of rows that have
--           changed since they were claimed, the claimed rows (0 if the claim needs the rules, or if rows
--           have changed; -1 if the newest claim has a lower token now), and the next event
local owner, groups, outcomes, keys, wanted = request[3], request[4], request[5], request[6], request[7]
local first_token = request[8] * 2097152 -- of the epoch
if wanted ~= 0 and not has_lease(owner, request[8], request[9]) then return 'lost' end

-- A script that has removed something may also write when memory is full: then running tasks can finish.
redis.call('HDEL', KEYS.idle, wanted ~= 0 and wanted[6] or '')

local missed, is_missed, ended_ids = {}, {}, {}

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
  elseif not (is_repeat and place == new_place) then
    miss(id)
  end
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

-- Remove the chosen members from the ready order. Lanes were read from their heads.
local function remove_chosen(chosen, lanes)
  local last, is_one = nil, true
  for position, lane in ipairs(lanes) do
    if lane ~= last and lane_sources[lane] then
      local head = string.sub(chosen[position], #lane + 1, #lane + ORDER_SIZE)
      move_head(lane, head, lane_sources[lane].order)
      lane_sources[lane] = nil
    end
    is_one = is_one and (not last or lane == last)
    last = lane
  end
  if is_one then
    redis.call('ZREMRANGEBYLEX', KEYS.ready, '[' .. chosen[1], '[' .. chosen[#chosen])
  else
    call_all('ZREM', KEYS.ready, chosen)
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
  local witness = request[10] ~= '' and redis.call('HGET', KEYS.places, request[10])
  if witness and string.sub(witness, KIND, KIND) ~= 'f' and (tonumber((split_place(witness))) or request[11]) < request[11] then
    return -1, ''
  end
  local gate = redis.call('ZRANGEBYLEX', KEYS.document_dues, '[gate/', '(gate/' .. now_stamp .. '0', 'LIMIT', 0, 1)
  if gate[1] or not move_due(due_by) then return 0, '' end
  local row_ids, chosen, lanes, asked = {}, {}, {}, { wanted[3], paused_queues(), wanted[4], 1 }
  begin_candidates(asked, '', limit)
  read_candidates(asked, '', limit, chosen, row_ids, lanes)
  local row_places, records, row_states = get_all(KEYS.places, row_ids), get_all(KEYS.tasks, row_ids), {}
  if #row_ids > 0 and redis.call('EXISTS', KEYS.states) == 1 then row_states = get_all(KEYS.states, row_ids) end
  local tokens, answer = {}, {}
  for position, id in ipairs(row_ids) do
    local place = row_places[position]
    if not records[position] or not is_plain(place, due_by) then return 0, '' end
    local known = end_of_place(place)
    if not known then return 0, '' end
    tokens[position] = string.format('%.0f', math.max(known.token + 1, first_token))
  end
  if #row_ids > 0 then
    remove_chosen(chosen, lanes)
    local held = hold_rows(owner .. '/' .. now_text .. '/' .. claim_id, row_ids, row_places, tokens, lanes)
    for position, id in ipairs(row_ids) do
      local last = 4 * position
      answer[last - 3], answer[last - 2] = id, held[2 * position]
      answer[last - 1], answer[last] = records[position], row_states[position] or ''
    end
    flush()
  end
  if #row_ids == limit then return answer, '' end
  return answer, wait_for_more(wanted[6], wanted[7])
end

local claimed, event = 0, ''
if wanted ~= 0 then claimed, event = claim() end
send_wakeups()
return { now_text, missed, claimed, event }
