-- Moves rows to other places, stores new rows, and deletes records.

-- Move a row from one place to another ('' stores no record). `state`: '' if it has not changed;
-- `record`: what is stored at its end, or its new record if it has not ended; `letter`: a dead letter or ''.
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
    if record ~= '' then put(KEYS.tasks, id, record) end
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

-- Store new rows, in groups of rows that differ in their ids and bodies only: { place up to the sequence,
-- place behind it, record up to the body, { id, body, … } }.
local function insert_rows(groups, size)
  local number = redis.call('INCRBY', KEYS.sequence, size) - size
  local new_places, records, index, due = {}, {}, {}, {}
  for _, group in ipairs(groups) do
    local head, foot, record, list = unpack(group)
    local rank, first = string.sub(head, ORDER_FIRST), number + 1
    local _, queue, func = split_place(head .. string.format('%016.0f', first) .. foot)
    -- What is visible follows the due time in `foot`.
    local is_due = string.sub(foot, VISIBLE_FIRST - SEQ_LAST, VISIBLE_LAST - SEQ_LAST) <= now_stamp
    local lane = lane_of(head, queue, func)
    for position = 1, #list, 2 do
      number = number + 1
      local id, seq, stored = list[position], string.format('%016.0f', number), #records
      records[stored + 1], records[stored + 2] = id, record .. list[position + 1]
      index[stored + 1], index[stored + 2] = 0, id
      if is_due then
        local ready = #due
        new_places[ready + 1], new_places[ready + 2] = id, head .. seq .. foot
        due[ready + 1], due[ready + 2] = 0, lane .. rank .. seq .. '/' .. id
      else
        add_to_sets(id, head .. seq .. foot)
      end
    end
    if is_due then
      change_lane(lane, rank .. string.format('%016.0f', first))
      add_claimable(queue, func, #list / 2)
      add_to_count(queue, 'p', #list / 2)
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
