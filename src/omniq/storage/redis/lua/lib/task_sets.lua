-- Adds tasks to the sorted sets that follow from their places, and removes them.
-- keys: places ready suspects parked delayed held success failed cancelled blocked
--
-- Members of the sorted sets are `<core>/<id>`. Those of `parked` begin with the gate and the suspect
-- flag, those of `delayed` with the due time and the kind.
local FINISHED_SETS = { s = success, f = failed, c = cancelled }

local function waiting_set(kind)
  if kind == 'r' then return ready end
  return kind == 's' and suspects or parked
end

local function waiting_member(id, kind, core, flags, rest)
  local member = core .. '/' .. id
  if kind == 'p' then member = rest .. '/' .. flag(flags, SUSPECT_FLAG) .. '/' .. member end
  return member
end

local function held_member(id, flags, rest)
  return string.match(rest, '^[^/]*') .. '/' .. flag(flags, SUSPECT_FLAG) .. '/' .. id
end

-- Put a task where its place says; returns its queue when it can be claimed there at once.
local function add_to_sets(id, place)
  local kind, core, queue, order, flags, _, rest = string.match(place, PLACE)
  local status = string.sub(flags, 1, 1)
  put(places, id, place)
  if kind == 'f' then
    local finished_at, expires_at = string.match(rest, '^(%d+)/(%d+)$')
    add(FINISHED_SETS[status], finished_at .. '/' .. id, expires_at)
    return nil
  end
  add_to_count(queue, status, 1)
  if kind == 'h' then
    add(held, held_member(id, flags, rest))
    return nil
  end
  local member = waiting_member(id, kind, core, flags, rest)
  local due = string.sub(order, DUE_FIRST, DUE_LAST)
  if flag(flags, VISIBLE_FLAG) == '1' and due > now_stamp then
    add(delayed, due .. kind .. member)
    return nil
  end
  add(waiting_set(kind), member)
  if kind == 'p' then redis.call('ZADD', blocked, 'NX', 0, rest) end
  return queue
end

-- Remove a task from where its place says it is.
local function remove_from_sets(id, place)
  local kind, core, queue, order, flags, _, rest = string.match(place, PLACE)
  local status = string.sub(flags, 1, 1)
  if kind == 'f' then
    remove(FINISHED_SETS[status], string.match(rest, '^%d+') .. '/' .. id)
    return
  end
  add_to_count(queue, status, -1)
  if kind == 'h' then
    remove(held, held_member(id, flags, rest))
    return
  end
  -- A claim may have moved it since it came due, or not: it is in one of the two.
  local member = waiting_member(id, kind, core, flags, rest)
  remove(waiting_set(kind), member)
  remove(delayed, string.sub(order, DUE_FIRST, DUE_LAST) .. kind .. member)
end
