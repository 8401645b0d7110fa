-- Asks to be told when a task ends, if it has not.
-- uses: request
-- keys: places awaited
-- request   3 id
-- returns   whether it is still to end
local place = redis.call('HGET', places, request[3])
if not place or string.sub(place, 1, 1) == 'f' then return 0 end
redis.call('SADD', awaited, request[3])
return 1
