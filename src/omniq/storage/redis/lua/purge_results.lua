-- Deletes finished tasks, a limited number per call.
-- uses: request writes places task_sets
-- keys: places tasks ended ids dead success failed cancelled sequence nonces
-- request   3 '' to delete those that have expired, or those that finished before this stamp, or one task by
--           its id; 4 status letter and 5 cursor for the second ('0' to begin with), '' for the others
-- returns   how many; '0' at the end, else the next cursor
local DELETED_PER_CALL = 500
local before, cursor = request[3], '0'

local old = {} -- { sorted set, member }
if before == '' then
  for _, set in pairs(FINISHED_SETS) do
    local found = redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, DELETED_PER_CALL)
    if #found == DELETED_PER_CALL then cursor = '1' end
    for _, member in ipairs(found) do old[#old + 1] = { set, member } end
  end
elseif request[4] == '' then
  local place = redis.call('HGET', places, before)
  if place and is_finished(place) and not is_expired(place) then
    local _, _, _, _, flags, _, rest = string.match(place, PLACE)
    old[1] = { FINISHED_SETS[string.sub(flags, 1, 1)], string.match(rest, '^%d+') .. '/' .. before }
  end
else
  local set = FINISHED_SETS[request[4]]
  local found = redis.call('ZSCAN', set, request[5], 'COUNT', DELETED_PER_CALL)
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
  -- No task is left whose order could matter.
  redis.call('DEL', sequence, nonces)
end
return { #old, cursor }
