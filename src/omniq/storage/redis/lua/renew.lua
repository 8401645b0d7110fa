-- Extends the lease of an owner.
-- uses: request writes held
-- request   3 owner, 4 length in microseconds, 5 its worker record, 6 whether this is its first lease
-- returns   'lost' when it had a lease and has none any more; else now, whether it is paused, and
--           id and place of each task it holds
-- A worker is stored as `<paused>/<length>/<epoch>/<beat>/<record>`.
local owner, length, info, is_first = request[3], request[4], request[5], request[6] == 1
if not is_first and not redis.call('ZSCORE', KEYS.leases, owner) then return 'lost' end
redis.call('HDEL', KEYS.idle, '') -- as in record_and_claim: then writing is allowed when memory is full
local known = redis.call('HGET', KEYS.workers, owner)
local paused, beat = string.match(known or '0/0/0/0/', '^(%d)/%d+/%d+/(%d+)/')
redis.call('ZADD', KEYS.leases, string.format('%.0f', now + length), owner)
redis.call('HSET', KEYS.workers, owner, paused .. string.format('/%.0f/0/%.0f/', length, beat + 1) .. info)
local answer, owner_ids = { now_text, paused }, held_ids(owner)
for position, place in ipairs(get_all(KEYS.places, owner_ids)) do
  answer[#answer + 1] = owner_ids[position]
  answer[#answer + 1] = place or ''
end
return answer
