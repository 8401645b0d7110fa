-- The tasks that an owner holds.
local function held_ids(owner, only_suspects)
  local found, start = {}, owner .. (only_suspects and '/1' or '')
  for position, member in ipairs(redis.call('ZRANGEBYLEX', KEYS.held, '[' .. start .. '/', '(' .. start .. '0')) do
    found[position] = string.match(member, '/([^/]*)$')
  end
  return found
end
