-- Records outcomes, then claims: one round trip of a worker.
-- uses: request writes waking places gates settling claiming
-- keys: leases idle
-- request   3 owner, 4 groups of plain endings and 5 other changes (see settling),
--           6 what to claim (see claiming) or 0
-- returns   'lost' when the owner has no lease and wants to claim; else
--           { now, codes of the endings and of the changes, taken, expired, whether to ask again, next event }
-- Nothing is claimed while a change has to be worked out anew.
local owner, groups, all, wish = request[3], request[4], request[5], request[6]
local is_leased = redis.call('ZSCORE', leases, owner)
if wish ~= 0 and not is_leased then return 'lost' end

-- A script that has removed something may also write when memory is full: what runs can finish.
redis.call('HDEL', idle, wish ~= 0 and wish[6] or '')

-- Whoever was fenced holds on to nothing, though it may not have been given back yet.
local function may_change(change)
  return is_leased or string.sub(change[2], 1, 1) ~= 'h'
end

local codes = end_groups(groups, owner, is_leased) .. settle(all, may_change)
local taken, expired, is_partial, event = {}, {}, 0, ''
if wish ~= 0 and not string.find(codes, '0', 1, true) then
  taken, expired, is_partial, event = claim(owner, wish)
end
send_wakes()
return { string.format('%.0f', now), codes, taken, expired, is_partial, event }
