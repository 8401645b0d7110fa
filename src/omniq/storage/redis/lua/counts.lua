-- Counts tasks and dead letters.
-- uses: request writes places
-- request   3 whether only waiting tasks are counted
-- returns   now; how many wait; the counters of live tasks; how many succeeded, failed and were cancelled;
--           how many dead letters; each queue in which a task waits, and the due time (a stamp) of its first
local MAX_STEPS = 5000 -- lanes and priorities that are read
local FEW = 1000 -- tasks of a set that are all read

local waiting = 0
for _, set in ipairs({ KEYS.ready, KEYS.parked, KEYS.delayed, KEYS.lingering }) do waiting = waiting + redis.call('ZCARD', set) end
if request[3] == 1 then return { now_text, waiting } end

local steps, first_due = 0, {}

local function add_due(place)
  if not place then return end
  local _, queue = split_place(place)
  -- A damaged place costs the statistics nothing but that task.
  if not queue then return end
  local due = string.sub(place, DUE_FIRST, DUE_LAST)
  if not first_due[queue] or due < first_due[queue] then first_due[queue] = due end
end

local function add_due_of(members)
  local ids = {}
  for position, member in ipairs(members) do ids[position] = string.match(member, '([^/]*)$') end
  for _, place in ipairs(get_all(KEYS.places, ids)) do add_due(place) end
end

-- In a set sorted by priority before turn, the first of each lane and priority is its oldest.
local function read_first_of_each_priority(set)
  local from = '-'
  while steps < MAX_STEPS do
    local first = redis.call('ZRANGEBYLEX', set, from, '+', 'LIMIT', 0, 1)[1]
    if not first then return end
    local lane, order, id = string.match(first, '^(.*/)(%d+)/([^/]*)$')
    add_due(redis.call('HGET', KEYS.places, id))
    -- ':' comes right after '9'.
    from = '[' .. lane .. string.sub(order, 1, TURN_FIRST - PRIORITY_FIRST) .. ':'
    steps = steps + 1
  end
end

-- A fair key or ageing gives a task a turn before tasks that are due earlier. So all of a short set are read.
local function read_first_due(set)
  local members = redis.call('ZRANGEBYLEX', set, '-', '+', 'LIMIT', 0, FEW)
  add_due_of(members)
  if #members == FEW then read_first_of_each_priority(set) end
end

read_first_due(KEYS.ready)
read_first_due(KEYS.parked)
-- Tasks that have come due and that no claim has moved yet.
add_due_of(redis.call('ZRANGEBYLEX', KEYS.delayed, '-', '[' .. now_stamp .. '~', 'LIMIT', 0, MAX_STEPS))
local firsts, finished = {}, {}
for queue, due in pairs(first_due) do
  firsts[#firsts + 1] = queue
  firsts[#firsts + 1] = due
end
for position, set in ipairs({ KEYS.succeeded, KEYS.failed, KEYS.cancelled }) do
  finished[position] = redis.call('ZCOUNT', set, '(' .. now_text, '+inf')
end
return { now_text, waiting, redis.call('HGETALL', KEYS.counts), finished, redis.call('HLEN', KEYS.dead), firsts }
