-- Reads the leases, and the owners that hold tasks without one.
-- uses: request
-- returns   now, then owner, until ('' without a lease) and worker record of each
local answer = { now_text }
local found = redis.call('ZRANGE', KEYS.leases, 0, -1, 'WITHSCORES')
for position = 1, #found, 2 do
  answer[#answer + 1] = found[position]
  answer[#answer + 1] = string.format('%.0f', found[position + 1])
  answer[#answer + 1] = redis.call('HGET', KEYS.workers, found[position]) or ''
end
local from = '-'
while true do
  local first = redis.call('ZRANGEBYLEX', KEYS.held, from, '+', 'LIMIT', 0, 1)[1]
  if not first then return answer end
  local owner = string.match(first, '^[^/]*')
  if not redis.call('ZSCORE', KEYS.leases, owner) then
    for _, value in ipairs({ owner, '', '' }) do answer[#answer + 1] = value end
  end
  -- '0' comes right after '/'.
  from = '[' .. owner .. '0'
end
