-- Reads the ids of dead letters and when they failed: in the order of ids, or those that failed in a time.
-- uses: request
-- request   3 the id before the first, 4 how many, 5 failed at this time or later, 6 and before this one
-- returns   whether all ids of that time are here (else the first ids of all), ids, and times
local after, limit, since, before = request[3], request[4], request[5], request[6]
if since ~= '-inf' or before ~= '+inf' then
  if redis.call('ZCOUNT', KEYS.dead_times, since, before) <= limit then
    local found = redis.call('ZRANGEBYSCORE', KEYS.dead_times, since, before)
    return { 1, found, {} }
  end
end
local page = redis.call('ZRANGEBYLEX', KEYS.dead_ids, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, limit)
local times = {}
for position, id in ipairs(page) do times[position] = redis.call('ZSCORE', KEYS.dead_times, id) or '0' end
return { 0, page, times }
