-- Forgets dead letters and their checkpoints.
-- uses: request writes
-- keys: dead letters checkpoints tasks places
-- request   3 ids, 4 only those whose last failure was before this stamp, or ''
-- returns   how many
local before, buried = request[4], 0
for _, id in ipairs(request[3]) do
  local letter = redis.call('HGET', dead, id)
  if letter and (before == '' or string.sub(letter, 1, 18) < before) then
    drop(dead, id)
    remove(letters, id)
    drop(checkpoints, id)
    if redis.call('HEXISTS', places, id) == 0 then drop(tasks, id) end
    buried = buried + 1
  elseif not letter and is_repeat then
    -- As far as anybody knows, the call whose reply was lost has done it.
    buried = buried + 1
  end
end
flush()
return buried
