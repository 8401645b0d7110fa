-- Fences every owner whose lease has ended, or that holds something without a lease.
-- uses: request held_rows
-- keys: leases workers resting
-- returns   now, then for each fenced owner that holds something: the owner, and a list of id,
--           place, record and state of all of it
local OWNERS_AT_ONCE = 100

for _, owner in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, OWNERS_AT_ONCE)) do
  redis.call('ZREM', leases, owner)
  redis.call('HDEL', workers, owner)
  redis.call('SREM', resting, owner)
end

local answer, from = { string.format('%.0f', now) }, '-'
while #answer < 2 * OWNERS_AT_ONCE do
  local first = redis.call('ZRANGEBYLEX', held, from, '+', 'LIMIT', 0, 1)[1]
  if not first then break end
  local owner = string.match(first, '^[^/]*')
  if not redis.call('ZSCORE', leases, owner) then
    local rows = {}
    append_rows(rows, owner)
    answer[#answer + 1] = owner
    answer[#answer + 1] = rows
  end
  from = '[' .. owner .. '0'
end
return answer
