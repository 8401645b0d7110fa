-- Ends rows that their owner still holds as it has claimed them, and that have nothing else: most outcomes.
-- A group is { queue, function, token, status, when it finished, when its record expires (0 stores none),
-- { id, record at its end, … } }, and takes few commands.

-- The ids of a group, their places, and the end of each new place; false where the owner does not hold the row
-- as it was claimed. Rows that were claimed together have the same end.
local function match_group(group, owner)
  local queue, func, token, _, finished_at, expires_at, list = unpack(group)
  local row_ids, ends, known_text, known_end = {}, {}, nil, false
  for position = 1, #list, 2 do row_ids[#row_ids + 1] = list[position] end
  local row_places = get_all(KEYS.places, row_ids)
  for position, place in ipairs(row_places) do
    ends[position] = false
    -- Held, running, not cancelled, and nothing attached.
    if place and string.sub(place, 1, 4) == 'hr00' then
      local text = string.sub(place, FIXED_LAST + 1)
      if text ~= known_text then
        local its_token, its_queue, its_func, expires, tail = split_place(place)
        known_text, known_end = text, false
        if its_token == token and its_queue == queue and its_func == func and string.match(tail, '^[^/]*') == owner then
          local middle = token .. '/' .. queue .. '/' .. func .. '/' .. expires .. '/'
          known_end = middle .. finished_at .. '/' .. expires_at
        end
      end
      ends[position] = known_end
    end
  end
  return row_ids, row_places, ends
end

-- End the rows that `match_group` has found, and append their ids.
local function end_group(group, owner, row_ids, row_places, ends, ended_ids)
  local queue, _, _, status, finished_at, expires_at, list = unpack(group)
  local new_places, released, records, index, dropped = {}, {}, {}, {}, {}
  for position, id in ipairs(row_ids) do
    local place = row_places[position]
    if ends[position] then
      ended_ids[#ended_ids + 1] = id
      released[#released + 1] = owner .. '/' .. string.sub(place, SUSPECT, SUSPECT) .. '/' .. id
      if expires_at == '0' then
        dropped[#dropped + 1] = id
      else
        local size = #records
        place = 'f' .. status .. string.sub(place, STATUS + 1, FIXED_LAST) .. ends[position]
        new_places[size + 1], new_places[size + 2] = id, place
        records[size + 1], records[size + 2] = id, list[2 * position]
        index[size + 1], index[size + 2] = expires_at, finished_at .. '/' .. id
      end
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

local function drop_states(ended_ids)
  if #ended_ids > 0 and redis.call('EXISTS', KEYS.states) == 1 then call_all('HDEL', KEYS.states, ended_ids) end
end
