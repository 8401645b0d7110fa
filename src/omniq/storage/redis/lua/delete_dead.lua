-- Deletes dead letters and their checkpoints.
-- uses: request places writes
-- keys: dead dead_ids checkpoints tasks places
-- request   3 ids, 4 only those whose last failure was before this stamp, or ''
-- returns   how many
local before, deleted = request[4], 0
for _, id in ipairs(request[3]) do
  local letter = redis.call('HGET', dead, id)
  if letter and (before == '' or string.sub(letter, 1, STAMP_SIZE) < before) then
    drop(dead, id)
    remove(dead_ids, id)
    drop(checkpoints, id)
    if redis.call('HEXISTS', places, id) == 0 then drop(tasks, id) end
    deleted = deleted + 1
  elseif not letter and is_repeat then
    -- Presumably deleted by the call whose reply was lost.
    deleted = deleted + 1
  end
end
flush()
return deleted
