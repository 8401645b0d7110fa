-- Whether a claim is the current one.
-- keys: places
local function is_held(id, owner, token)
  local place = redis.call('HGET', places, id)
  if not place then return false end
  local its_token, its_owner = string.match(place, '^h[^/]*/%d+%a%d%d%d%d%d(%d+)/([^/]*)/')
  return its_owner == owner and tonumber(its_token) == token
end
