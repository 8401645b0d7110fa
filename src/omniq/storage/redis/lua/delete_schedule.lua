-- Deletes a schedule.
-- uses: request
-- keys: schedules
-- request   3 id
-- returns   whether there was one; a repeat presumes that the lost call found it
return (redis.call('HDEL', schedules, request[3]) == 1 or is_repeat) and 1 or 0
