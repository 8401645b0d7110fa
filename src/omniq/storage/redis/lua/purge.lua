-- Forgets finished tasks, as many as one call may.
-- uses: request writes places
-- keys: places tasks ended ids dead success failed cancelled sequence nonces
-- request   3 '' to forget what has expired, or what finished before this stamp, or one task by its id;
--           4 status letter and 5 cursor for the second ('0' to begin with), '' for the others
-- returns   how many; '0' at the end, else the next cursor
local FORGOTTEN_AT_ONCE = 500
local before, cursor = request[3], '0'

local old = {} -- { sorted set, member }
if before == '' then
  for _, set in pairs(KEPT) do
    local found = redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, FORGOTTEN_AT_ONCE)
    if #found == FORGOTTEN_AT_ONCE then cursor = '1' end
    for _, member in ipairs(found) do old[#old + 1] = { set, member } end
  end
elseif request[4] == '' then
  local place = redis.call('HGET', places, before)
  if place and string.sub(place, 1, 1) == 'f' and not is_over(place) then
    local _, _, _, _, flags, _, rest = string.match(place, PLACE)
    old[1] = { KEPT[string.sub(flags, 1, 1)], string.match(rest, '^%d+') .. '/' .. before }
  end
else
  local set = KEPT[request[4]]
  local found = redis.call('ZSCAN', set, request[5], 'COUNT', FORGOTTEN_AT_ONCE)
  cursor = found[1]
  for position = 1, #found[2], 2 do
    local member = found[2][position]
    if stamp(tonumber(string.match(member, '^%d+'))) < before then old[#old + 1] = { set, member } end
  end
end

for _, each in ipairs(old) do
  local set, member = unpack(each)
  local id = string.match(member, '/(.*)$')
  remove(set, member)
  drop(places, id)
  drop(ended, id)
  remove(ids, id)
  if redis.call('HEXISTS', dead, id) == 0 then drop(tasks, id) end
end
flush()
if #old > 0 and redis.call('EXISTS', tasks) == 0 then
  -- Nothing is left whose order could matter.
  redis.call('DEL', sequence, nonces)
end
return { #old, cursor }
