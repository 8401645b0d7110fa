-- Adds tasks to the sorted sets that follow from their places, and removes them.
--
-- Members: `delayed` <visible>/<id>; `parked` <gate>/<lane><order>/<id>; `held` <owner>/<suspect>/<id>;
-- of finished tasks <finished>/<id>, with the time at which the record expires as score. `lingering`
-- are held tasks that do not run: their failure is recorded, and they are to be rescheduled.
local first_delayed -- as a stamp; read for the first task that is not due yet
local ALWAYS_VISIBLE = '100000000000000000' -- the stamp of 0
local FINISHED_SETS = { s = KEYS.succeeded, f = KEYS.failed, c = KEYS.cancelled }

local function lane_of(place, queue, func)
  return string.sub(place, SUSPECT, SUSPECT) .. queue .. '/' .. func .. '/'
end

-- Of waiting rows: token, lane, what is between the token and the tail, and the tail; nil if it is damaged.
-- Most rows that a call reads have the same, and splitting a place takes long.
local known_ends = {}

local function end_of_place(place)
  local text = string.sub(place, FIXED_LAST + 1)
  local known = known_ends[text]
  local suspect = string.sub(place, SUSPECT, SUSPECT)
  if not known or known.suspect ~= suspect then
    local token, queue, func, expires, tail = split_place(place)
    if not token or queue == '' or func == '' or string.find(expires, '%D') then return nil end
    local middle = '/' .. queue .. '/' .. func .. '/'
    known = { token = token, lane = suspect .. string.sub(middle, 2), middle = middle .. expires .. '/', tail = tail, suspect = suspect }
    known_ends[text] = known
  end
  return known
end

local function held_member(id, place, tail)
  return string.match(tail, '^[^/]*') .. '/' .. string.sub(place, SUSPECT, SUSPECT) .. '/' .. id
end

local function waiting_member(id, place, lane)
  return lane .. string.sub(place, ORDER_FIRST, ORDER_LAST) .. '/' .. id
end

-- Add a waiting task to where claims find it.
local function add_claimable_row(id, place, queue, func, tail)
  local lane = lane_of(place, queue, func)
  local member = waiting_member(id, place, lane)
  if string.sub(place, KIND, KIND) == 'p' then
    add(KEYS.parked, tail .. '/' .. member)
  else
    add(KEYS.ready, member)
    change_lane(lane, string.sub(place, ORDER_FIRST, ORDER_LAST))
    add_claimable(queue, func, 1)
  end
end

-- Put a task where its place says.
local function add_to_sets(id, place)
  local _, queue, func, _, tail = split_place(place)
  local kind, status = string.sub(place, KIND, KIND), string.sub(place, STATUS, STATUS)
  put(KEYS.places, id, place)
  if kind == 'f' then
    local finished_at, expires_at = string.match(tail, '^(%d+)/(%d+)$')
    add(FINISHED_SETS[status], finished_at .. '/' .. id, expires_at)
    return
  end
  add_to_count(queue, status, 1)
  if kind == 'h' then
    add(KEYS.held, held_member(id, place, tail))
    if status ~= 'r' then add(KEYS.lingering, id) end
    return
  end
  local visible = string.sub(place, VISIBLE_FIRST, VISIBLE_LAST)
  if visible > now_stamp then
    add(KEYS.delayed, visible .. '/' .. id)
    first_delayed = first_delayed or redis.call('ZRANGEBYLEX', KEYS.delayed, '-', '+', 'LIMIT', 0, 1)[1] or '~'
    if visible < first_delayed then
      -- A worker that waits until the first task comes due has to wait for this one now.
      first_delayed = visible
      add_claimable(queue, func, 0)
    end
  else
    add_claimable_row(id, place, queue, func, tail)
  end
end

-- Remove a task from where its place says it is.
local function remove_from_sets(id, place)
  local _, queue, func, _, tail = split_place(place)
  local kind, status = string.sub(place, KIND, KIND), string.sub(place, STATUS, STATUS)
  if kind == 'f' then
    remove(FINISHED_SETS[status], string.match(tail, '^%d+') .. '/' .. id)
    return
  end
  add_to_count(queue, status, -1)
  if kind == 'h' then
    remove(KEYS.held, held_member(id, place, tail))
    if status ~= 'r' then remove(KEYS.lingering, id) end
    return
  end
  -- A claim may have moved it since it came due, or not: it is in one of the two.
  local lane = lane_of(place, queue, func)
  local member = waiting_member(id, place, lane)
  local visible = string.sub(place, VISIBLE_FIRST, VISIBLE_LAST)
  if visible ~= ALWAYS_VISIBLE then remove(KEYS.delayed, visible .. '/' .. id) end
  if kind == 'p' then
    remove(KEYS.parked, tail .. '/' .. member)
  else
    remove(KEYS.ready, member)
    change_lane(lane)
  end
end
