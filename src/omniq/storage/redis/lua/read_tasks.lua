-- Reads the stored tasks of these ids.
-- uses: request places
-- keys: places tasks states ended dead
-- request   3 ids
-- returns   now, then place, record, and state of each (of a finished task, what was stored at its end);
--           without a place, the record and dead letter that are left
local answer = { string.format('%.0f', now) }
for _, id in ipairs(request[3]) do
  local place = redis.call('HGET', places, id)
  if place and is_expired(place) then place = false end
  local is_ended = place and is_finished(place)
  answer[#answer + 1] = place or ''
  answer[#answer + 1] = redis.call('HGET', tasks, id) or ''
  answer[#answer + 1] = redis.call('HGET', not place and dead or is_ended and ended or states, id) or ''
end
return answer
