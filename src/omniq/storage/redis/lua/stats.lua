-- Counts tasks and dead letters.
-- uses: request places
-- keys: counts ready suspects parked delayed success failed cancelled dead
-- returns   now; the counters of live tasks; how many succeeded, failed and were cancelled; how many
--           dead letters; each queue in which a task waits, and the due time (a stamp) of its first
local MAX_STEPS = 5000 -- pairs of a queue and a priority that are read

local steps, first_due = 0, {}

local function add_due(queue, due)
  if not first_due[queue] or due < first_due[queue] then first_due[queue] = due end
end

-- In a set sorted by priority before due time, the first of each priority is its oldest.
local function read_first_of_each_priority(set)
  local from = '-'
  while steps < MAX_STEPS do
    local first = redis.call('ZRANGEBYLEX', set, from, '+', 'LIMIT', 0, 1)[1]
    if not first then return end
    local before, order = string.match(first, '^(.*/)(%d+)%a%d+/[^/]*$')
    add_due(string.match(before, '([^/]*)/$'), string.sub(order, DUE_FIRST, DUE_LAST))
    -- ':' comes right after '9'.
    from = '[' .. before .. string.sub(order, 1, PRIORITY_LAST) .. ':'
    steps = steps + 1
  end
end

for _, set in ipairs({ ready, suspects, parked }) do read_first_of_each_priority(set) end
-- Tasks that have come due and that no claim has moved yet.
for _, member in ipairs(redis.call('ZRANGEBYLEX', delayed, '-', '[' .. now_stamp .. '~', 'LIMIT', 0, MAX_STEPS)) do
  local waiting = string.sub(member, STAMP_SIZE + 2)
  add_due(string.match(waiting, '([^/]*)/%d+%a%d+/[^/]*$'), string.sub(member, 1, STAMP_SIZE))
end
local firsts = {}
for queue, due in pairs(first_due) do
  firsts[#firsts + 1] = queue
  firsts[#firsts + 1] = due
end

local finished = {}
for position, set in ipairs({ success, failed, cancelled }) do
  finished[position] = redis.call('ZCOUNT', set, string.format('(%.0f', now), '+inf')
end
return { string.format('%.0f', now), redis.call('HGETALL', counts), finished, redis.call('HLEN', dead), firsts }
