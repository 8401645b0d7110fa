-- Moves tasks from where they were to where outcomes put them.
-- keys: places tasks states ended ids terms unique dead letters checkpoints progress newest
--
-- A change is { id, guard, place, state, ended, more }
--   guard   the place the change starts from; anything else there leaves the task alone
--   place   the new one; '' keeps no record
--   state, ended   what to keep there; '' leaves it as it is
--   more    0, or { unique key, gates, effect, reason, newest result, letter }
local current = {} -- id → place as of the changes made so far; false when there is none

local function look_at(ids_asked)
  for position, place in ipairs(get_all(places, ids_asked)) do current[ids_asked[position]] = place end
end

-- Whatever is kept beside a live task goes with it, but for the checkpoint of a dead letter.
local BESIDE = { states, terms, progress, newest, checkpoints }

local function clear_beside(id, letter)
  for _, key in ipairs(BESIDE) do
    if key ~= checkpoints or letter == '' then drop(key, id) end
  end
end

local function keep_ended(id, place, record, letter)
  clear_beside(id, letter)
  if letter ~= '' then
    put(dead, id, letter)
    add(letters, id)
  end
  if place ~= '' then
    put(ended, id, record)
    return
  end
  drop(places, id)
  remove(ids, id)
  if letter == '' then drop(tasks, id) end
end

local function keep_live(id, state, newest_result)
  if state ~= '' then put(states, id, state) end
  if newest_result ~= '' then
    put(newest, id, newest_result)
    drop(checkpoints, id)
    drop(progress, id)
  end
end

local function tell_gates(id, guard, asked, effect, reason)
  local token = tonumber(string.match(guard, '^%a[^/]*/%d+%a%d%d%d%d%d(%d+)/'))
  for _, gate in ipairs(asked) do
    leave(gate, gate_state(gate[1]), id, token, effect, now, reason)
    is_changed[gate[1]] = true
  end
end

-- Make one change: '1' done (also when it was this very call that did it), '0' the task is elsewhere.
local function change_one(change, ended_ids)
  local id, guard, place, more = change[1], change[2], change[3], change[6]
  local known = current[id]
  if known ~= guard then
    return is_repeat and (known or '') == place and '1' or '0'
  end
  local letter, newest_result = '', ''
  unfile(id, guard)
  if more ~= 0 then
    tell_gates(id, guard, more[2], more[3], more[4])
    newest_result, letter = more[5], more[6]
    if more[1] ~= '' and redis.call('HGET', unique, more[1]) == id then drop(unique, more[1]) end
  end
  if place ~= '' then
    local queue = file(id, place)
    if queue then wake(queue, 1) end
  end
  if place == '' or string.sub(place, 1, 1) == 'f' then
    keep_ended(id, place, change[5], letter)
    ended_ids[#ended_ids + 1] = id
  else
    keep_live(id, change[4], newest_result)
  end
  current[id] = place ~= '' and place
  return '1'
end

-- What most outcomes come to: held tasks end, with nothing beside them to look after. A group is
-- { queue, status before, suspect, status, finished, expires (0 keeps no record),
--   { id, guard, place, ended, … } }
local function end_group(group, owner, codes, ended_ids, beside)
  local queue, before, suspect, status, finished_at, expires_at, list = unpack(group)
  local asked, at, gone, kept_records, index, forgotten = {}, {}, {}, {}, {}, {}
  for position = 1, #list, 4 do asked[#asked + 1] = list[position] end
  local known = get_all(places, asked)
  for position, id in ipairs(asked) do
    local guard, place, record = list[4 * position - 2], list[4 * position - 1], list[4 * position]
    if known[position] ~= guard then
      codes[#codes + 1] = is_repeat and (known[position] or '') == place and '1' or '0'
    else
      codes[#codes + 1] = '1'
      ended_ids[#ended_ids + 1] = id
      gone[#gone + 1] = owner .. '/' .. suspect .. '/' .. id
      for _, key in ipairs(beside) do drop(key, id) end
      if expires_at == 0 then
        forgotten[#forgotten + 1] = id
      else
        local size = #at
        at[size + 1], at[size + 2] = id, place
        kept_records[size + 1], kept_records[size + 2] = id, record
        index[size + 1], index[size + 2] = expires_at, finished_at .. '/' .. id
      end
    end
  end
  count(queue, before, -#gone)
  call_all('ZREM', held, gone)
  call_all('HSET', places, at)
  call_all('HSET', ended, kept_records)
  call_all('ZADD', KEPT[status], index)
  call_all('HDEL', places, forgotten)
  call_all('HDEL', tasks, forgotten)
  call_all('ZREM', ids, forgotten)
end

local function end_groups(groups, owner, is_leased)
  if #groups == 0 then return '' end
  local codes, ended_ids, beside = {}, {}, {}
  for _, key in ipairs(BESIDE) do
    if redis.call('EXISTS', key) == 1 then beside[#beside + 1] = key end
  end
  for _, group in ipairs(groups) do
    if is_leased then
      end_group(group, owner, codes, ended_ids, beside)
    else
      for _ = 1, #group[7] / 4 do codes[#codes + 1] = '2' end
    end
  end
  tell_ended(ended_ids)
  return table.concat(codes)
end

-- Make the changes that start from where their tasks are; for each '1', '0', or '2' when `may_change`
-- forbids it.
local function settle(all, may_change)
  local asked, codes, ended_ids = {}, {}, {}
  for position, change in ipairs(all) do asked[position] = change[1] end
  if #asked > 0 then look_at(asked) end
  for position, change in ipairs(all) do
    if may_change and not may_change(change) then
      codes[position] = '2'
    else
      codes[position] = change_one(change, ended_ids)
    end
  end
  flush()
  if flush_gates() then wake('', 1) end
  tell_ended(ended_ids)
  return table.concat(codes)
end
