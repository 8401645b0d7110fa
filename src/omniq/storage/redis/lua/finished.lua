-- Reads the ids of finished tasks: those whose record has expired, or, in the order of ids, those that
-- finished in time.
-- uses: request writes places
-- request   3 'expires_at' or 'finished_at', 4 at that time or before, 5 how many, 6 the id before the first
-- returns   the id to continue after ('' at the end), then ids
local PLACES_PER_CALL = 1000
local before, limit, after, answer = request[4], request[5], request[6], { '' }

-- The caller deletes what it has read, so that each call reads from the start.
local function add_expired(set)
  local found = redis.call('ZRANGEBYSCORE', set, '-inf', before, 'LIMIT', 0, limit + 1 - #answer)
  local found_ids = {}
  for position, member in ipairs(found) do found_ids[position] = string.match(member, '/(.*)$') end
  for position, place in ipairs(get_all(KEYS.places, found_ids)) do
    if place and is_finished(place) then
      answer[#answer + 1] = found_ids[position]
    else
      -- Its place was changed by hand: it cannot be deleted, and would be read for ever.
      redis.call('ZREM', set, found[position])
    end
  end
end

if request[3] == 'expires_at' then
  for _, set in ipairs({ KEYS.succeeded, KEYS.failed, KEYS.cancelled }) do add_expired(set) end
  return answer
end
local page = redis.call('ZRANGEBYLEX', KEYS.ids, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, PLACES_PER_CALL)
for position, place in ipairs(get_all(KEYS.places, page)) do
  local finished_at = place and is_finished(place) and string.match(place, '^.*/(%d+)/%d+$', FIXED_LAST + 1)
  if finished_at and tonumber(finished_at) <= before then answer[#answer + 1] = page[position] end
  answer[1] = page[position]
  if #answer > limit then return answer end
end
if #page < PLACES_PER_CALL then answer[1] = '' end
return answer
