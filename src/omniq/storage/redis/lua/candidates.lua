-- Reads the first waiting rows that a claim may take.
-- uses: request writes wakeups places lanes task_sets rows candidates
-- request   3 due by, 4 wanted (see lib/candidates), 5 the order behind which to begin or '', 6 how many,
--           7 channel of the worker or '', 8 its interest (see lib/wakeups)
-- returns   now, whether to call again, the next event ('' if there are more rows), and the rows
local due_by, wanted, after, limit = request[3], request[4], request[5], request[6]
if not move_due(due_by) then return { now_text, 1, '', {} } end

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
  local digits = string.match(place, '^w[pt](%d+)/[^/]+/[^/]+/%d*/')
  return not digits or #digits < FIXED_LAST - 1
end

local rows, is_end = {}, false
begin_candidates(wanted, after, limit)
while #rows < 4 * limit and not is_end do
  local row_ids, row_members, row_lanes = {}, {}, {}
  local size = limit - #rows / 4
  read_candidates(wanted, after, size, row_members, row_ids, row_lanes)
  is_end = #row_ids < size
  local row_places, has_record = get_all(KEYS.places, row_ids), get_all(KEYS.tasks, row_ids)
  for position, id in ipairs(row_ids) do
    local place = row_places[position]
    if not place or not has_record[position] then
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
  append_rows(rows, row_ids, row_places, true)
end
flush()
update_heads()
return { now_text, 0, is_end and wait_for_more(request[7], request[8]) or '', rows }
