-- Moves tasks to the places where outcomes put them.
-- keys: places tasks states ended ids conditions unique dead dead_ids checkpoints progress newest
--
-- A change is { id, guard, place, state, ended, more }
--   guard   the place the change starts from; a task in any other place is not changed
--   place   the new one; '' stores no record
--   state, ended   what to store there; '' leaves it as it is
--   more    0, or { unique key, gates, effect, reason, newest result, dead letter }
local current = {} -- id → place as of the changes made so far; false when there is none

local function load_places(task_ids)
  for position, place in ipairs(get_all(places, task_ids)) do current[task_ids[position]] = place end
end

-- The data of a live task; it is deleted with the task, except for the checkpoint of a dead letter.
local LIVE_DATA = { states, conditions, progress, newest, checkpoints }

local function drop_live_data(id, letter)
  for _, key in ipairs(LIVE_DATA) do
    if key ~= checkpoints or letter == '' then drop(key, id) end
  end
end

local function store_ended(id, place, record, letter)
  drop_live_data(id, letter)
  if letter ~= '' then
    put(dead, id, letter)
    add(dead_ids, id)
  end
  if place ~= '' then
    put(ended, id, record)
    return
  end
  drop(places, id)
  remove(ids, id)
  if letter == '' then drop(tasks, id) end
end

local function store_live(id, state, newest_result)
  if state ~= '' then put(states, id, state) end
  if newest_result ~= '' then
    put(newest, id, newest_result)
    drop(checkpoints, id)
    drop(progress, id)
  end
end

local function leave_gates(id, guard, task_gates, effect, reason)
  local token = tonumber((string.match(guard, CLAIM)))
  for _, gate in ipairs(task_gates) do
    leave(gate, gate_state(gate[1]), id, token, effect, now, reason)
    is_changed[gate[1]] = true
  end
end

-- Make one change: '1' done (also when this same call did it before), '0' the task is in another place.
local function apply_change(change, ended_ids)
  local id, guard, place, more = change[1], change[2], change[3], change[6]
  local known = current[id]
  if known ~= guard then
    return is_repeat and (known or '') == place and '1' or '0'
  end
  local letter, newest_result = '', ''
  remove_from_sets(id, guard)
  if more ~= 0 then
    leave_gates(id, guard, more[2], more[3], more[4])
    newest_result, letter = more[5], more[6]
    if more[1] ~= '' and redis.call('HGET', unique, more[1]) == id then drop(unique, more[1]) end
  end
  if place ~= '' then
    local queue = add_to_sets(id, place)
    if queue then add_claimable(queue, 1) end
  end
  if place == '' or is_finished(place) then
    store_ended(id, place, change[5], letter)
    ended_ids[#ended_ids + 1] = id
  else
    store_live(id, change[4], newest_result)
  end
  current[id] = place ~= '' and place
  return '1'
end

-- Most outcomes: held tasks end that have no gates, no unique key and no dead letter. A group is
-- { queue, status before, suspect, status, finished, expires (0 stores no record),
--   { id, guard, place, ended, … } }
local function end_group(group, owner, codes, ended_ids, live_data)
  local queue, before, suspect, status, finished_at, expires_at, list = unpack(group)
  local group_ids, new_places, released, ended_records, index, dropped = {}, {}, {}, {}, {}, {}
  for position = 1, #list, 4 do group_ids[#group_ids + 1] = list[position] end
  local known = get_all(places, group_ids)
  for position, id in ipairs(group_ids) do
    local guard, place, record = list[4 * position - 2], list[4 * position - 1], list[4 * position]
    if known[position] ~= guard then
      codes[#codes + 1] = is_repeat and (known[position] or '') == place and '1' or '0'
    else
      codes[#codes + 1] = '1'
      ended_ids[#ended_ids + 1] = id
      released[#released + 1] = owner .. '/' .. suspect .. '/' .. id
      for _, key in ipairs(live_data) do drop(key, id) end
      if expires_at == 0 then
        dropped[#dropped + 1] = id
      else
        local size = #new_places
        new_places[size + 1], new_places[size + 2] = id, place
        ended_records[size + 1], ended_records[size + 2] = id, record
        index[size + 1], index[size + 2] = expires_at, finished_at .. '/' .. id
      end
    end
  end
  add_to_count(queue, before, -#released)
  call_all('ZREM', held, released)
  call_all('HSET', places, new_places)
  call_all('HSET', ended, ended_records)
  call_all('ZADD', FINISHED_SETS[status], index)
  call_all('HDEL', places, dropped)
  call_all('HDEL', tasks, dropped)
  call_all('ZREM', ids, dropped)
end

-- End the tasks of all groups; for each '1' or '0' as above, or '2' when the owner has no lease.
local function end_groups(groups, owner, is_leased)
  if #groups == 0 then return '' end
  local codes, ended_ids, live_data = {}, {}, {}
  for _, key in ipairs(LIVE_DATA) do
    if redis.call('EXISTS', key) == 1 then live_data[#live_data + 1] = key end
  end
  for _, group in ipairs(groups) do
    if is_leased then
      end_group(group, owner, codes, ended_ids, live_data)
    else
      for _ = 1, #group[7] / 4 do codes[#codes + 1] = '2' end
    end
  end
  notify_ended(ended_ids)
  return table.concat(codes)
end

-- Make the changes whose tasks are where the changes start; for each '1' or '0' as above, or '2' when
-- `may_change` forbids it.
local function apply_changes(changes, may_change)
  local task_ids, codes, ended_ids = {}, {}, {}
  for position, change in ipairs(changes) do task_ids[position] = change[1] end
  if #task_ids > 0 then load_places(task_ids) end
  for position, change in ipairs(changes) do
    if may_change and not may_change(change) then
      codes[position] = '2'
    else
      codes[position] = apply_change(change, ended_ids)
    end
  end
  flush()
  if flush_gates() then add_claimable('', 1) end
  notify_ended(ended_ids)
  return table.concat(codes)
end
