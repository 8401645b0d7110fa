-- Applies changes that are not outcomes of an owner: cancelled, expired, given back.
-- uses: request writes wakeups places task_sets gates changes
-- keys: idle
-- request   3 changes (see lib/changes)
-- returns   for each '1' done, or '0' when the task is in another place
redis.call('HDEL', idle, '') -- as in record_and_claim: then writing is allowed when memory is full
local codes = apply_changes(request[3])
send_wakeups()
return codes
