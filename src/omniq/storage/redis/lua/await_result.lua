-- Asks for a notification when a task ends, if it has not ended yet.
-- uses: request places
-- request   3 id
-- returns   whether the task has yet to end
local place = redis.call('HGET', KEYS.places, request[3])
if not place or is_finished(place) then return 0 end
redis.call('SADD', KEYS.awaited, request[3])
return 1
