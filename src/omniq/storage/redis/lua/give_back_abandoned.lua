-- Fences each owner whose lease has expired, or that holds tasks without a lease.
-- uses: request held
-- keys: leases workers paused_workers
-- returns   now, then for each fenced owner that holds tasks: the owner, and a list of id, place,
--           record and state of each task; `apply_changes` then gives them back
local OWNERS_PER_CALL = 100

for _, owner in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, OWNERS_PER_CALL)) do
  redis.call('ZREM', leases, owner)
  redis.call('HDEL', workers, owner)
  redis.call('SREM', paused_workers, owner)
end

local answer, from = { string.format('%.0f', now) }, '-'
while #answer < 2 * OWNERS_PER_CALL do
  local first = redis.call('ZRANGEBYLEX', held, from, '+', 'LIMIT', 0, 1)[1]
  if not first then break end
  local owner = string.match(first, '^[^/]*')
  if not redis.call('ZSCORE', leases, owner) then
    local rows = {}
    append_rows(rows, owner)
    answer[#answer + 1] = owner
    answer[#answer + 1] = rows
  end
  -- '0' comes right after '/'.
  from = '[' .. owner .. '0'
end
return answer
