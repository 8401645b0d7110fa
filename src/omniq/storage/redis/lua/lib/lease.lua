-- Whether an owner has the lease that it knows: of this epoch, renewed as often as it says, and with as many claims.
-- The claims of an owner are counted in `workers`, under its id and a '#'.
local function has_lease(owner, known_epoch, known_beat, known_claims)
  local found = redis.call('HMGET', KEYS.workers, owner, owner .. '#')
  local epoch, beat = string.match(found[1] or '', '^%d/%d+/(%d+)/(%d+)/')
  return epoch and tonumber(epoch) == known_epoch and tonumber(beat) >= known_beat
    and tonumber(found[2] or 0) >= known_claims
end
