-- Reads the ids of finished tasks whose record has expired, or that finished in time, a part per call.
-- uses: request
-- request   3 'expires_at' or 'finished_at', 4 at that time or before, 5 how many, 6 which status, 7 cursor
-- returns   the next cursor ('0' at the end), then ids
local set = ({ s = KEYS.succeeded, f = KEYS.failed, c = KEYS.cancelled })[request[6]]
local answer = { '0' }
if request[3] == 'expires_at' then
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', request[4], 'LIMIT', 0, request[5])) do
    answer[#answer + 1] = string.match(member, '/(.*)$')
  end
  return answer
end
local found = redis.call('ZSCAN', set, request[7], 'COUNT', request[5])
answer[1] = found[1]
for position = 1, #found[2], 2 do
  local finished_at, id = string.match(found[2][position], '^(%d+)/(.*)$')
  if tonumber(finished_at) <= tonumber(request[4]) then answer[#answer + 1] = id end
end
return answer
