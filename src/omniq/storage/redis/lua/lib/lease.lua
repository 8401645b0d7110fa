-- Whether an owner has the lease that it knows: of this epoch, and renewed as often as it says.
local function has_lease(owner, known_epoch, known_beat)
  local epoch, beat = string.match(redis.call('HGET', KEYS.workers, owner) or '', '^%d/%d+/(%d+)/(%d+)/')
  return epoch and tonumber(epoch) == known_epoch and tonumber(beat) >= known_beat
end
