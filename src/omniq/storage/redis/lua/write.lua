-- Makes the changes of one section, all or none.
-- uses: request writes wakeups results places heads lanes task_sets documents changes endings
-- request   3 nonce of the call, or '' if a repeat needs none; 4 the owner that claims or records, or '';
--           5 the paused queues as the claim has read them, or 0 if nothing is claimed;
--           6 rows: { id, place as read, new place, state or '', record at its end or a new one or '', dead letter
--           or '', its time of failure, whether only the start of its place is known, whether it is left out if others
--           have taken it, its state as read or 0 if its place says all that others may change }; the same place
--           twice checks the row, and writes its state and its record if they are given;
--           7 documents (see lib/documents); 8 new rows (see lib/changes); 9 how many may wait, 0 for any;
--           10 finished tasks and 11 dead letters to delete: { id, as read ('' for any) }; 12 only tasks that
--           finished before this time, 0 for any; 13 groups of endings (see lib/endings)
-- returns   'lost', 'moved', 'full', or the ids of rows that were left out
local nonce, owner, rows, changes, inserted, bound = request[3], request[4], request[6], request[7], request[8], request[9]
local deleted_finished, deleted_dead, groups = request[10], request[11], request[13]
local NONCE_SECONDS = 600 -- for which a nonce is stored

-- The rows that are not held as this claim has left them: others took them first.
local function not_held()
  local found = {}
  for _, row in ipairs(rows) do
    local _, _, _, _, tail = split_place(row[3])
    local _, _, _, _, its_tail = split_place(redis.call('HGET', KEYS.places, row[1]) or '')
    if string.sub(row[3], KIND, KIND) == 'h' and its_tail ~= tail then found[#found + 1] = row[1] end
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
  local is_same = place == row[2]
  if is_same and row[10] ~= 0 then is_same = (redis.call('HGET', KEYS.states, row[1]) or '') == row[10] end
  if not is_same then
    if row[9] == 0 then return 'moved' end
    left_out[#left_out + 1] = row[1]
    row[3] = row[2]
  end
end
local endings = {}
for position, group in ipairs(groups) do
  local ids, places, ends = match_group(group, owner)
  for each = 1, #ids do
    if not ends[each] then return 'moved' end
  end
  endings[position] = { ids, places, ends }
end
if #left_out > 0 and #left_out == #rows + #groups then return 'moved' end
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
  if from ~= place then
    if move_row(id, from, place, state, record, letter, failed_at) then ended_ids[#ended_ids + 1] = id end
  else
    if state ~= '' then put(KEYS.states, id, state) end
    if record ~= '' then put(KEYS.tasks, id, record) end
  end
end
for position, group in ipairs(groups) do
  local ids, places, ends = unpack(endings[position])
  end_group(group, owner, ids, places, ends, ended_ids)
end
drop_states(ended_ids)
for position, each in ipairs(deleted_finished) do
  local place = finished_places[position]
  local finished_at = place and is_finished(place) and string.match(place, '^.*/(%d+)/%d+$', FIXED_LAST + 1)
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
