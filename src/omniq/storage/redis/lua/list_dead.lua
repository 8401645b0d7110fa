-- Reads the ids of dead letters and when they failed: in the order of ids, or those that failed in a time.
-- uses: request
-- request   3 the id before the first, 4 how many, 5 failed at this time or later, 6 and before this one
-- returns   whether all ids of that time are here (else the first ids of all), ids, and times if they matter
local after, limit, since, before = request[3], request[4], request[5], request[6]
local is_timed = since ~= '-inf' or before ~= '+inf'
if is_timed and redis.call('ZCOUNT', KEYS.dead_times, since, before) <= limit then
  return { 1, redis.call('ZRANGEBYSCORE', KEYS.dead_times, since, before), {} }
end
local page = redis.call('ZRANGEBYLEX', KEYS.dead_ids, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, limit)
if not is_timed or #page == 0 then return { 0, page, {} } end
return { 0, page, redis.call('ZMSCORE', KEYS.dead_times, unpack(page)) }
