-- Keeps what a task needs to resume, if the claim is the current one.
-- uses: request holding
-- keys: checkpoints leases
-- request   3 owner, 4 id, 5 token, 6 checkpoint
-- returns   whether it was kept
-- A checkpoint is kept behind the stamp of when that was.
local owner, id = request[3], request[4]
if not is_held(id, owner, request[5]) or not redis.call('ZSCORE', leases, owner) then return 0 end
redis.call('HSET', checkpoints, id, now_stamp .. request[6])
return 1
