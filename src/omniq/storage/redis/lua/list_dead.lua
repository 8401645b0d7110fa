-- Reads dead letters in the order of their ids, of those that failed in a time.
-- uses: request writes sorting
-- request   3 the id before the first, 4 how many, 5 failed at this time or later, 6 and before this one
-- returns   the id to continue after ('' at the end), then the letters
local FEW = 4000 -- letters of the time that are sorted here; if there are more, as many of all are checked
local after, limit, since, before = request[3], request[4], request[5], request[6]
local is_timed, found, reached = since ~= '-inf' or before ~= '+inf', {}, ''

local function next_ids(size)
  return redis.call('ZRANGEBYLEX', KEYS.dead_ids, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, size)
end

if not is_timed then
  found = next_ids(limit)
  if #found == limit then reached = found[limit] end
elseif SORTS_BYTES and redis.call('ZCOUNT', KEYS.dead_times, since, before) <= FEW then
  local all = redis.call('ZRANGEBYSCORE', KEYS.dead_times, since, before)
  table.sort(all)
  for _, id in ipairs(all) do
    if id > after then
      if #found == limit then
        reached = found[limit]
        break
      end
      found[#found + 1] = id
    end
  end
else
  local ids = next_ids(FEW)
  local low, high = tonumber(since) or -math.huge, tonumber(string.match(before, '%d+')) or math.huge
  if #ids == FEW then reached = ids[FEW] end
  for position, failed_at in ipairs(#ids > 0 and redis.call('ZMSCORE', KEYS.dead_times, unpack(ids)) or {}) do
    local time = tonumber(failed_at or '')
    if time and time >= low and time < high then
      found[#found + 1] = ids[position]
      if #found == limit then
        reached = ids[position]
        break
      end
    end
  end
end
local answer = { reached }
for _, letter in ipairs(get_all(KEYS.dead, found)) do
  if letter and #letter <= LARGEST_VALUE then answer[#answer + 1] = letter end
end
return answer
