-- How much of what there is.
-- uses: request
-- keys: counts ready suspects parked delayed success failed cancelled dead
-- returns   now; the counters of live tasks; how many succeeded, failed and were cancelled; how many
--           dead letters; each queue in which a task waits, and the due time (a stamp) of its first
local JUMPS = 5000 -- pairs of a queue and a priority that are looked at

local jumps, first_due = 0, {}

local function note(queue, due)
  if not first_due[queue] or due < first_due[queue] then first_due[queue] = due end
end

-- In a set sorted by priority before due time, the first of each priority is its oldest.
local function look_through(set)
  local from = '-'
  while jumps < JUMPS do
    local first = redis.call('ZRANGEBYLEX', set, from, '+', 'LIMIT', 0, 1)[1]
    if not first then return end
    local before, order = string.match(first, '^(.*/)(%d+)%a%d+/[^/]*$')
    note(string.match(before, '([^/]*)/$'), string.sub(order, 21, 38))
    -- ':' comes right after '9'.
    from = '[' .. before .. string.sub(order, 1, 20) .. ':'
    jumps = jumps + 1
  end
end

for _, set in ipairs({ ready, suspects, parked }) do look_through(set) end
-- Those that have come due, and that no claim has moved yet.
for _, member in ipairs(redis.call('ZRANGEBYLEX', delayed, '-', '[' .. now_stamp .. '~', 'LIMIT', 0, JUMPS)) do
  note(string.match(string.sub(member, 20), '([^/]*)/%d+%a%d+/[^/]*$'), string.sub(member, 1, 18))
end
local firsts = {}
for queue, due in pairs(first_due) do
  firsts[#firsts + 1] = queue
  firsts[#firsts + 1] = due
end

local kept = {}
for position, set in ipairs({ success, failed, cancelled }) do
  kept[position] = redis.call('ZCOUNT', set, string.format('(%.0f', now), '+inf')
end
return { string.format('%.0f', now), redis.call('HGETALL', counts), kept, redis.call('HLEN', dead), firsts }
