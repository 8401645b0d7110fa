-- Has an owner hold waiting rows.

local function count_held(row_lanes, row_places)
  local last, status, number = nil, nil, 0
  for position = 1, #row_lanes + 1 do
    local place = row_places[position]
    local its_status = place and string.sub(place, STATUS, STATUS)
    if row_lanes[position] ~= last or its_status ~= status then
      if last then
        local queue = string.match(last, '^.([^/]*)')
        add_to_count(queue, status, -number)
        add_to_count(queue, 'r', number)
      end
      last, status, number = row_lanes[position], its_status, 0
    end
    number = number + 1
  end
end

-- The end of the place of a row that is held: `known` is that of its waiting place (see lib/task_sets), `tail`
-- owner/started/claim.
local function held_end(known, token, tail)
  if known.held_token ~= token then
    known.held_token, known.held_end = token, string.format('%.0f', token) .. known.middle .. tail
  end
  return known.held_end
end

-- Hold rows, whose new places have these ends. The caller removes them from `ready` or `parked`. Returns id and
-- new place of each.
local function hold_rows(owner, row_ids, row_places, ends, row_lanes)
  local new_places, held_members = {}, {}
  for position, id in ipairs(row_ids) do
    local place, size = row_places[position], 2 * position
    local held = 'hr' .. string.sub(place, STATUS + 1, FIXED_LAST) .. ends[position]
    new_places[size - 1], new_places[size] = id, held
    held_members[size - 1], held_members[size] = 0, owner .. '/' .. string.sub(place, SUSPECT, SUSPECT) .. '/' .. id
  end
  call_all('HSET', KEYS.places, new_places)
  call_all('ZADD', KEYS.held, held_members)
  count_held(row_lanes, row_places)
  return new_places
end
