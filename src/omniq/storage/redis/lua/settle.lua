-- Makes changes that are not an owner's outcomes: cancelled, expired, given back.
-- uses: request writes waking places gates settling
-- keys: idle
-- request   3 changes (see settling)
-- returns   for each '1' done or '0' when the task is elsewhere
redis.call('HDEL', idle, '') -- as in turn: allowed when memory is full
local codes = settle(request[3])
send_wakes()
return codes
