-- Extends the lease of an owner.
-- uses: request writes held epoch
-- request   3 owner, 4 length in microseconds, 5 its worker record, 6 the epoch and 7 the beat that the owner
--           knows; the beat is 0 for its first lease; 8 how many of its calls have claimed, as it knows
-- returns   now, the store's epoch, the lease's beat (0 if nothing is known of the owner), the store's record,
--           whether the lease is renewed and the owner paused ('' if it is refused), and id and place of each
--           task it holds
-- A worker is stored as `<paused>/<length>/<epoch>/<beat>/<record>`.
local owner, length, info, known_epoch, known_beat = request[3], request[4], request[5], request[6], request[7]
local known = redis.call('ZSCORE', KEYS.leases, owner) and redis.call('HGET', KEYS.workers, owner)
local paused, epoch, beat = string.match(known or '0/0/0/0/', '^(%d)/%d+/(%d+)/(%d+)/')
beat = tonumber(beat)
local is_refused = store_epoch < known_epoch
if known_beat > 0 then
  is_refused = not known or store_epoch ~= known_epoch or tonumber(epoch) ~= store_epoch or beat < known_beat
  if not is_refused and tonumber(redis.call('HGET', KEYS.workers, owner .. '#') or 0) < request[8] then
    -- Claims are forgotten, which says the same as a lower beat.
    is_refused, beat = true, known_beat - 1
  end
end
local answer = { now_text, string.format('%.0f', store_epoch), '', string.match(store_record, '/(.*)$') or '', '' }
if is_refused then
  if not known then
    for _, member in ipairs(redis.call('ZRANGE', KEYS.fences, 0, -1)) do
      local fenced, its_beat = string.match(member, '^(.*)/(%d+)$')
      if fenced == owner then beat = math.max(beat, tonumber(its_beat)) end
    end
  end
  answer[3] = string.format('%.0f', beat)
  return answer
end
answer[3], answer[5] = string.format('%.0f', beat + 1), paused
redis.call('HDEL', KEYS.idle, '') -- as in record_and_claim: then writing is allowed when memory is full
redis.call('ZADD', KEYS.leases, string.format('%.0f', now + length), owner)
redis.call('HSET', KEYS.workers, owner, paused .. string.format('/%.0f/%.0f/%.0f/', length, store_epoch, beat + 1) .. info)
local owner_ids = held_ids(owner)
for position, place in ipairs(get_all(KEYS.places, owner_ids)) do
  answer[#answer + 1] = owner_ids[position]
  answer[#answer + 1] = place or ''
end
return answer
