-- Stores the checkpoint of a task, if the claim is the current one.
-- uses: request places current_claim
-- keys: checkpoints leases
-- request   3 owner, 4 id, 5 token, 6 checkpoint
-- returns   whether it was stored
-- A checkpoint is stored behind the stamp of the time at which it was saved.
local owner, id = request[3], request[4]
if not is_current_claim(id, owner, request[5]) or not redis.call('ZSCORE', leases, owner) then return 0 end
redis.call('HSET', checkpoints, id, now_stamp .. request[6])
return 1
