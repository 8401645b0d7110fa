-- Stores or replaces a schedule, and increases its version.
-- uses: request
-- keys: schedules
-- request   3 id, 4 nonce of the call, 5 the schedule, 6 the version to begin at
-- A schedule is stored as `version/nonce/schedule`.
local id, nonce = request[3], request[4]
local known = redis.call('HGET', schedules, id)
local version = known and tonumber(string.match(known, '^%d+')) + 1 or request[6]
if known and string.match(known, '^%d+/([^/]*)/') == nonce then return 'OK' end
redis.call('HSET', schedules, id, string.format('%.0f', version) .. '/' .. nonce .. '/' .. request[5])
return 'OK'
