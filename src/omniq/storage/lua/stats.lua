-- How much of what there is.
-- uses: request
-- keys: counts ready suspects parked delayed success failed cancelled dead
-- returns   now; the counters of live tasks; how many succeeded, failed and were cancelled; how many
--           dead letters; the due time (a stamp) of the task that waits longest, or ''
local JUMPS = 5000 -- pairs of a queue and a priority that are looked at

local jumps, oldest = 0, ''

-- In a set sorted by priority before due time, the first of each priority is its oldest.
local function look_through(set)
  local from = '-'
  while jumps < JUMPS do
    local first = redis.call('ZRANGEBYLEX', set, from, '+', 'LIMIT', 0, 1)[1]
    if not first then return end
    local before, order = string.match(first, '^(.*/)(%d+)%a%d+/[^/]*$')
    local due = string.sub(order, 21, 38)
    if oldest == '' or due < oldest then oldest = due end
    -- ':' comes right after '9'.
    from = '[' .. before .. string.sub(order, 1, 20) .. ':'
    jumps = jumps + 1
  end
end

for _, set in ipairs({ ready, suspects, parked }) do look_through(set) end
local first = redis.call('ZRANGEBYLEX', delayed, '-', '+', 'LIMIT', 0, 1)[1]
if first and (oldest == '' or string.sub(first, 1, 18) < oldest) then oldest = string.sub(first, 1, 18) end

local kept = {}
for position, set in ipairs({ success, failed, cancelled }) do
  kept[position] = redis.call('ZCOUNT', set, string.format('(%.0f', now), '+inf')
end
return { string.format('%.0f', now), redis.call('HGETALL', counts), kept, redis.call('HLEN', dead), oldest }
