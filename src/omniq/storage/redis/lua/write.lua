-- Makes the changes of one section, all or none.
-- uses: request writes wakeups results places heads lanes task_sets documents changes endings holding
-- request   3 nonce of the call, or '' if a repeat needs none; 4 the owner that claims or records, or '';
--           5 the paused queues as the claim has read them, or 0 if nothing is claimed;
--           6 rows: { id, place as read, new place, state or '', record at its end, dead letter or '', its
--           time of failure, whether only the start of its place is known }; the same place twice only checks
--           the row;
--           7 documents (see lib/documents); 8 new rows (see lib/changes); 9 how many may wait, 0 for any;
--           10 finished tasks and 11 dead letters to delete: { id, as read ('' for any) }; 12 only tasks that
--           finished before this time, 0 for any; 13 groups of endings (see lib/endings); 14 waiting rows
--           to claim, in groups: { kind of the place, its end behind the parts of fixed size, 1 if they may be
--           left out or 0, with the new token, { id, sequence, … } }; 15 the tail of their places; 16 ready
--           rows to park, in such groups, with the name of the gate
-- returns   'lost', 'moved', 'full', or the ids of rows that were left out
local nonce, owner, rows, changes, inserted, bound = request[3], request[4], request[6], request[7], request[8], request[9]
local deleted_finished, deleted_dead, groups = request[10], request[11], request[13]
local claimed, parked = request[14], request[16]
local NONCE_SECONDS = 600 -- for which a nonce is stored

-- The rows to claim that are not held by this claim: others took them first.
local function not_held()
  local found = {}
  for _, group in ipairs(claimed) do
    for position = 1, #group[4], 2 do
      local id = group[4][position]
      local _, _, _, _, tail = split_place(redis.call('HGET', KEYS.places, id) or '')
      if tail ~= request[15] then found[#found + 1] = id end
    end
  end
  return found
end

if is_repeat and nonce ~= '' and redis.call('ZSCORE', KEYS.nonces, nonce) then return not_held() end
if request[5] ~= 0 then
  if not redis.call('ZSCORE', KEYS.leases, owner) then return 'lost' end
  if table.concat(paused_queues(), '/') ~= table.concat(request[5], '/') then return 'moved' end
end

local function ids_of(list)
  local found = {}
  for position, each in ipairs(list) do found[position] = each[1] end
  return found
end

-- Check everything before the first change.
local left_out, is_deleted, new_ids = {}, {}, {}
for position, place in ipairs(get_all(KEYS.places, ids_of(rows))) do
  local row = rows[position]
  if row[8] == 1 and place and string.sub(place, 1, #row[2]) == row[2] then row[2] = place end
  if place ~= row[2] then return 'moved' end
end
local endings = {}
for position, group in ipairs(groups) do
  local ids, places, ends = match_group(group, owner)
  for each = 1, #ids do
    if not ends[each] then return 'moved' end
  end
  endings[position] = { ids, places, ends }
end
local waiting_ids, waiting_places = {}, {}
for _, list in ipairs({ claimed, parked }) do
  for _, group in ipairs(list) do
    for position = 1, #group[4], 2 do waiting_ids[#waiting_ids + 1] = group[4][position] end
  end
end
for position, place in ipairs(get_all(KEYS.places, waiting_ids)) do waiting_places[waiting_ids[position]] = place end

-- Whether a waiting row is as it was read.
local function is_same(place, kind, text, seq)
  return place and string.sub(place, KIND, KIND) == kind and string.sub(place, FIXED_LAST + 1) == text
    and tonumber(string.sub(place, SEQ_FIRST, SEQ_LAST)) == seq
end

local claimed_ids, claimed_places, ends, claimed_lanes, offered = {}, {}, {}, {}, {}
local ready_members, ready_lanes, parked_places, parked_members = {}, {}, {}, {}
for _, group in ipairs(claimed) do
  local kind, text, change, list = unpack(group)
  for position = 1, #list, 2 do
    local id, size = list[position], #claimed_ids + 1
    local place = waiting_places[id]
    if is_same(place, kind, text, list[position + 1]) then
      local known = end_of_place(place)
      local member = waiting_member(id, place, known.lane)
      claimed_ids[size], claimed_places[size], claimed_lanes[size] = id, place, known.lane
      ends[size] = held_end(known, tonumber(string.sub(change, 2)), request[15])
      if kind == 'w' then
        ready_members[#ready_members + 1], ready_lanes[#ready_lanes + 1] = member, known.lane
      else
        offered[#offered + 1] = known.tail .. '/' .. member
      end
    elseif string.sub(change, 1, 1) == '1' then
      left_out[#left_out + 1] = id
    else
      return 'moved'
    end
  end
end
for _, group in ipairs(parked) do
  local kind, text, gate, list = unpack(group)
  for position = 1, #list, 2 do
    local id, size = list[position], #parked_places
    local place = waiting_places[id]
    if not is_same(place, kind, text, list[position + 1]) then return 'moved' end
    local lane = end_of_place(place).lane
    local member = waiting_member(id, place, lane)
    ready_members[#ready_members + 1], ready_lanes[#ready_lanes + 1] = member, lane
    parked_members[size + 1], parked_members[size + 2] = 0, gate .. '/' .. member
    parked_places[size + 1], parked_places[size + 2] = id, 'p' .. string.sub(place, STATUS) .. gate
  end
end
if #left_out > 0 and #left_out == #rows + #groups + #waiting_ids then return 'moved' end
read_documents(changes)
for _, change in ipairs(changes) do
  if not is_unchanged(change) then return 'moved' end
end
local finished_places = get_all(KEYS.places, ids_of(deleted_finished))
for position, each in ipairs(deleted_finished) do
  local place = finished_places[position]
  if each[2] ~= '' and place ~= each[2] then return 'moved' end
  is_deleted[each[1]] = true
end
for _, each in ipairs(deleted_dead) do
  if each[2] ~= '' and redis.call('HGET', KEYS.dead, each[1]) ~= each[2] then return 'moved' end
  is_deleted[each[1]] = true
end
for _, group in ipairs(inserted) do
  for position = 1, #group[4], 2 do new_ids[#new_ids + 1] = group[4][position] end
end
local replaced = {}
for position, record in ipairs(get_all(KEYS.tasks, new_ids)) do
  if record then
    local id = new_ids[position]
    local place, is_free = redis.call('HGET', KEYS.places, id), true
    if place then is_free = is_expired(place) or (is_deleted[id] and is_finished(place)) end
    if not is_deleted[id] and redis.call('HEXISTS', KEYS.dead, id) == 1 then is_free = false end
    if not is_free then return 'moved' end
    -- Also when a dead letter is retried whose record has expired.
    if place then replaced[#replaced + 1] = { id, place } end
  end
end
if bound > 0 and #new_ids > 0 then
  local waiting = redis.call('ZCARD', KEYS.ready) + redis.call('ZCARD', KEYS.parked) + redis.call('ZCARD', KEYS.delayed)
  if waiting + #new_ids > bound then return 'full' end
end

-- A script that has removed something may also write when memory is full: then running tasks can finish.
if #inserted == 0 then redis.call('HDEL', KEYS.idle, '') end
local ended_ids = {}
for _, row in ipairs(rows) do
  local id, from, place, state, record, letter, failed_at = unpack(row)
  if from ~= place and move_row(id, from, place, state, record, letter, failed_at) then
    ended_ids[#ended_ids + 1] = id
  end
end
for position, group in ipairs(groups) do
  local ids, places, ends = unpack(endings[position])
  end_group(group, owner, ids, places, ends, ended_ids)
end
drop_states(ended_ids)
remove_ready(ready_members, ready_lanes)
call_all('ZREM', KEYS.parked, offered)
call_all('ZADD', KEYS.parked, parked_members)
call_all('HSET', KEYS.places, parked_places)
hold_rows(owner, claimed_ids, claimed_places, ends, claimed_lanes)
for position, each in ipairs(deleted_finished) do
  local place = finished_places[position]
  local finished_at = place and is_finished(place) and string.match(place, '(%d+)/%d+$')
  if finished_at and (request[12] == 0 or tonumber(finished_at) < request[12]) then
    delete_finished(each[1], place, redis.call('HEXISTS', KEYS.dead, each[1]) == 1)
  end
end
for _, each in ipairs(deleted_dead) do
  delete_dead(each[1], redis.call('HEXISTS', KEYS.places, each[1]) == 1)
end
for _, each in ipairs(replaced) do delete_finished(each[1], each[2], false) end
if #inserted > 0 then
  -- What is left of a task that had the same id goes first.
  flush()
  insert_rows(inserted, #new_ids)
end
for _, change in ipairs(changes) do
  apply_document(change)
  if change[1] == 'store/store' then
    -- An epoch begins: every lease ends, and the numbers of new tasks start above all earlier ones.
    redis.call('DEL', KEYS.leases, KEYS.workers)
    local first = tonumber(string.sub(change[6], 3)) * 2097152
    if tonumber(redis.call('GET', KEYS.sequence) or 0) < first then
      redis.call('SET', KEYS.sequence, string.format('%.0f', first))
    end
  end
  -- A queue is resumed.
  if string.sub(change[1], 1, 13) == 'paused_queue/' then add_claimable('', '', 1) end
end
flush()
update_heads()
if nonce ~= '' then
  redis.call('ZADD', KEYS.nonces, now, nonce)
  redis.call('ZREMRANGEBYSCORE', KEYS.nonces, '-inf', now - NONCE_SECONDS * 1000000)
  redis.call('EXPIRE', KEYS.nonces, NONCE_SECONDS)
end
notify_ended(ended_ids)
send_wakeups()
return left_out
