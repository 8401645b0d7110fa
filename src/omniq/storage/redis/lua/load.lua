-- Reads everything that is stored under these ids.
-- uses: request writes places rows
-- request   3 ids, 4 whether with bodies
-- returns   now, then for each: place ('' if there is none), record, state (of a finished task, what was
--           stored at its end), dead letter
local answer = { now_text }
local found, records = get_all(KEYS.places, request[3]), get_all(KEYS.tasks, request[3])
local letters = get_all(KEYS.dead, request[3])
for position, id in ipairs(request[3]) do
  local place, record, size = found[position], records[position] or '', #answer
  if place and is_expired(place) then place = false end
  -- Not written by omniq. The reply says that there is a place, and that it cannot be read.
  if place == '' then place = '?' end
  answer[size + 1] = place or ''
  if request[4] == 0 or #record > LARGEST_VALUE then record = without_body(record) end
  answer[size + 2] = record
  local state = place and redis.call('HGET', is_finished(place) and KEYS.ended or KEYS.states, id) or ''
  answer[size + 3] = fitting(state)
  answer[size + 4] = fitting(letters[position] or '')
end
return answer
