-- What is on record of tasks.
-- uses: request
-- keys: places tasks states ended dead
-- request   3 ids
-- returns   now, then place, record, and state or what was kept at the end, of each;
--           without a place, the record and dead letter that are left
local answer = { string.format('%.0f', now) }
for _, id in ipairs(request[3]) do
  local place = redis.call('HGET', places, id)
  local is_ended = place and string.sub(place, 1, 1) == 'f'
  if is_ended and tonumber(string.match(place, '(%d+)$')) <= now then place, is_ended = false, false end
  answer[#answer + 1] = place or ''
  answer[#answer + 1] = redis.call('HGET', tasks, id) or ''
  answer[#answer + 1] = redis.call('HGET', not place and dead or is_ended and ended or states, id) or ''
end
return answer
