-- Deletes old checkpoints that have neither a live task nor a dead letter, a part of them per call.
-- uses: request places
-- keys: checkpoints places dead
-- request   3 saved before this stamp, 4 cursor ('0' to begin with)
-- returns   how many; the next cursor, '0' at the end
local found = redis.call('HSCAN', checkpoints, request[4], 'COUNT', 200)
local deleted = 0
for position = 1, #found[2], 2 do
  local id, saved = found[2][position], string.sub(found[2][position + 1], 1, STAMP_SIZE)
  local place = redis.call('HGET', places, id)
  local is_live = place and not is_finished(place)
  if saved < request[3] and not is_live and redis.call('HEXISTS', dead, id) == 0 then
    deleted = deleted + redis.call('HDEL', checkpoints, id)
  end
end
return { deleted, found[1] }
