-- Records outcomes, then claims: one round trip of a worker.
-- uses: request writes wakeups places task_sets gates changes claim
-- keys: leases idle
-- request   3 owner, 4 groups of plain endings and 5 other changes (see lib/changes),
--           6 what to claim (see lib/claim) or 0
-- returns   'lost' when the owner has no lease and wants to claim; else
--           { now, codes of the endings and of the changes, claimed, expired, whether to call again, next event }
-- Nothing is claimed while a change has to be planned again.
local owner, groups, changes, wanted = request[3], request[4], request[5], request[6]
local is_leased = redis.call('ZSCORE', leases, owner)
if wanted ~= 0 and not is_leased then return 'lost' end

-- A script that has removed something may also write when memory is full: then running tasks can finish.
redis.call('HDEL', idle, wanted ~= 0 and wanted[6] or '')

-- An owner that was fenced holds nothing, even if its tasks have not been given back yet.
local function may_change(change)
  return is_leased or kind_of(change[2]) ~= 'h'
end

local codes = end_groups(groups, owner, is_leased) .. apply_changes(changes, may_change)
local claimed, expired, is_partial, event = {}, {}, 0, ''
if wanted ~= 0 and not string.find(codes, '0', 1, true) then
  claimed, expired, is_partial, event = claim(owner, wanted)
end
send_wakeups()
return { string.format('%.0f', now), codes, claimed, expired, is_partial, event }
