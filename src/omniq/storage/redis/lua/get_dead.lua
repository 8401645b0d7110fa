-- Reads a dead letter, its checkpoint, and the record from which its task can be retried.
-- uses: request
-- keys: dead checkpoints tasks
-- request   3 id
-- returns   { letter, checkpoint or '', record }, or nothing
local id = request[3]
local letter = redis.call('HGET', dead, id)
if not letter then return {} end
return { letter, redis.call('HGET', checkpoints, id) or '', redis.call('HGET', tasks, id) or '' }
