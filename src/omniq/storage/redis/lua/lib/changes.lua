-- Moves rows to other places, stores new rows, and deletes records.

-- Move a row from one place to another ('' stores no record). `state`: '' if it has not changed;
-- `record`: what is stored at its end; `letter`: a dead letter or ''.
local function move_row(id, from, place, state, record, letter, failed_at)
  remove_from_sets(id, from)
  if place ~= '' then add_to_sets(id, place) end
  if letter ~= '' then
    put(KEYS.dead, id, letter)
    add(KEYS.dead_ids, id)
    add(KEYS.dead_times, id, failed_at)
  end
  if place ~= '' and not is_finished(place) then
    if state ~= '' then put(KEYS.states, id, state) end
    return false
  end
  drop(KEYS.states, id)
  if place ~= '' then
    put(KEYS.ended, id, record)
  else
    drop(KEYS.places, id)
    remove(KEYS.ids, id)
    if letter == '' then drop(KEYS.tasks, id) end
  end
  return true
end

-- Store new rows: { id, place up to the sequence, place behind it, record }. Rows that are enqueued
-- together mostly differ in their ids only, so that what follows from the rest is found once.
local function insert_rows(rows)
  local number = redis.call('INCRBY', KEYS.sequence, #rows) - #rows
  local kinds, new_places, records, index, due = {}, {}, {}, {}, {}
  for position, row in ipairs(rows) do
    local id, head, foot, record = unpack(row)
    local seq, kind = string.format('%016.0f', number + position), kinds[foot]
    local place = head .. seq .. foot
    if not kind then
      local _, queue, func = split_place(place)
      local is_due = string.sub(place, VISIBLE_FIRST, VISIBLE_LAST) <= now_stamp
      kind = { queue = queue, func = func, lane = is_due and lane_of(place, queue, func), count = 0 }
      kinds[foot] = kind
    end
    records[2 * position - 1], records[2 * position] = id, record
    index[2 * position - 1], index[2 * position] = 0, id
    if kind.lane then
      local order = string.sub(head, ORDER_FIRST) .. seq
      local size = #new_places
      new_places[size + 1], new_places[size + 2] = id, place
      due[size + 1], due[size + 2] = 0, kind.lane .. order .. '/' .. id
      kind.count = kind.count + 1
      if not kind.first or order < kind.first then kind.first = order end
    else
      add_to_sets(id, place)
    end
  end
  for _, kind in pairs(kinds) do
    if kind.lane then
      change_lane(kind.lane, kind.first)
      add_claimable(kind.queue, kind.func, kind.count)
      add_to_count(kind.queue, 'p', kind.count)
    end
  end
  call_all('HSET', KEYS.tasks, records)
  call_all('HSET', KEYS.places, new_places)
  call_all('ZADD', KEYS.ids, index)
  call_all('ZADD', KEYS.ready, due)
end

-- Delete the record of a finished task; its id is free unless it has a dead letter.
local function delete_finished(id, place, has_letter)
  remove_from_sets(id, place)
  drop(KEYS.places, id)
  drop(KEYS.ended, id)
  remove(KEYS.ids, id)
  if not has_letter then drop(KEYS.tasks, id) end
end

local function delete_dead(id, has_record)
  drop(KEYS.dead, id)
  remove(KEYS.dead_ids, id)
  remove(KEYS.dead_times, id)
  if not has_record then drop(KEYS.tasks, id) end
end
