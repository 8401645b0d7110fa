-- Reads the first rows that a claim may take, once `move_due` has moved those that have come due.

local function forget(id, place, member, lane)
  -- Its record was deleted by hand.
  remove(KEYS.ready, member)
  change_lane(lane)
  drop(KEYS.places, id)
  remove(KEYS.ids, id)
  if place then
    local _, queue = split_place(place)
    add_to_count(queue, string.sub(place, STATUS, STATUS), -1)
  end
end

local function is_damaged(place)
  local _, last = string.find(place, '^w[pt]%d+')
  return not last or last <= FIXED_LAST or not end_of_place(place)
end

-- The rows (see lib/rows), and whether there are no more. `wanted`, `after`: see lib/candidates.
local function first_rows(due_by, wanted, after, limit)
  local rows, is_end = {}, false
  begin_candidates(wanted, after, limit)
  while #rows < 4 * limit and not is_end do
    local row_ids, row_members, row_lanes = {}, {}, {}
    local size = limit - #rows / 4
    read_candidates(wanted, after, size, row_members, row_ids, row_lanes)
    is_end = #row_ids < size
    local row_places, records = get_all(KEYS.places, row_ids), get_all(KEYS.tasks, row_ids)
    for position, id in ipairs(row_ids) do
      local place = row_places[position]
      if not place or not records[position] then
        forget(id, place, row_members[position], row_lanes[position])
      elseif is_damaged(place) then
        -- It must not hold up others.
        remove(KEYS.ready, row_members[position])
        change_lane(row_lanes[position])
        row_places[position] = false
      elseif string.sub(place, VISIBLE_FIRST, VISIBLE_LAST) > due_by then
        -- It came due for a caller whose time was ahead of this caller's.
        row_places[position] = false
      end
    end
    append_rows(rows, row_ids, row_places, true, records)
  end
  flush()
  update_heads()
  return rows, is_end
end
