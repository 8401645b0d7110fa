-- Whether a claim is the current one.
-- keys: places
local function is_current_claim(id, owner, token)
  local place = redis.call('HGET', places, id)
  if not place or kind_of(place) ~= 'h' then return false end
  local current_token, current_owner = string.match(place, CLAIM)
  return current_owner == owner and tonumber(current_token) == token
end
