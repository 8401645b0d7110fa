-- Where a task is: one text that says it all, and the sorted sets that follow from it.
-- keys: places ready suspects parked delayed held success failed cancelled blocked
--
--   <kind><queue>/<order><flags><token>/<rest>
--
--   kind    r ready, s suspect, p parked, h held, f finished
--   order   54 digits that sort as tasks are claimed: priority (20, highest first), due (18),
--           sequence (16)
--   flags   status (p r t s f c), then 1 or 0: visible from its due time only, has terms, suspect,
--           cancelled, its last claim ended by an outcome
--   token   of the last claim
--   rest    p: the gate that blocks it; h: owner/started/claim; f: finished/expires
--
-- Whoever changes a task says where it thinks the task is: no two states of a task share a text.
-- Members of the sorted sets are `queue/order flags token/id`; a gate and the suspect flag stand
-- before those that are parked, the due time and the kind before those that are delayed.
local PLACE = '^(%a)(([^/]*)/(%d+)(%a%d%d%d%d%d)(%d+))/(.*)$'

local KEPT = { s = success, f = failed, c = cancelled }

local function waiting_set(kind)
  if kind == 'r' then return ready end
  return kind == 's' and suspects or parked
end

local function waiting_member(id, kind, core, flags, rest)
  local member = core .. '/' .. id
  if kind == 'p' then member = rest .. '/' .. string.sub(flags, 4, 4) .. '/' .. member end
  return member
end

local function held_member(id, flags, rest)
  return string.match(rest, '^[^/]*') .. '/' .. string.sub(flags, 4, 4) .. '/' .. id
end

-- Put a task where its place says; gives its queue when it can be claimed there at once.
local function file(id, place)
  local kind, core, queue, order, flags, _, rest = string.match(place, PLACE)
  local status = string.sub(flags, 1, 1)
  put(places, id, place)
  if kind == 'f' then
    local finished_at, expires_at = string.match(rest, '^(%d+)/(%d+)$')
    add(KEPT[status], finished_at .. '/' .. id, expires_at)
    return nil
  end
  count(queue, status, 1)
  if kind == 'h' then
    add(held, held_member(id, flags, rest))
    return nil
  end
  local member = waiting_member(id, kind, core, flags, rest)
  local due = string.sub(order, 21, 38)
  if string.sub(flags, 2, 2) == '1' and due > now_stamp then
    add(delayed, due .. kind .. member)
    return nil
  end
  add(waiting_set(kind), member)
  if kind == 'p' then redis.call('ZADD', blocked, 'NX', 0, rest) end
  return queue
end

-- Take a task away from where it is.
local function unfile(id, place)
  local kind, core, queue, order, flags, _, rest = string.match(place, PLACE)
  local status = string.sub(flags, 1, 1)
  if kind == 'f' then
    remove(KEPT[status], string.match(rest, '^%d+') .. '/' .. id)
    return
  end
  count(queue, status, -1)
  if kind == 'h' then
    remove(held, held_member(id, flags, rest))
    return
  end
  -- It may have come due, or not: it is in one of the two.
  local member = waiting_member(id, kind, core, flags, rest)
  remove(waiting_set(kind), member)
  remove(delayed, string.sub(order, 21, 38) .. kind .. member)
end

-- Whether the place is that of a record whose time is over.
local function is_over(place)
  return string.sub(place, 1, 1) == 'f' and tonumber(string.match(place, '(%d+)$')) <= now
end
