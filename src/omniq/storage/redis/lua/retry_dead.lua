-- Puts the task of a dead letter back into the queue.
-- uses: request writes wakeups places task_sets insert
-- keys: places dead dead_ids checkpoints
-- request   3 the dead letter as it was read, 4 the row (see lib/insert), 5 max_pending or 0,
--           6 whether its checkpoint is deleted
-- returns   { 'done' }, { 'gone' } when there is no dead letter, { 'changed' } when it is another one,
--           { 'full' }, or { 'taken', holder } when its unique key is held
local letter, row, max_pending, from_start = request[3], request[4], request[5], request[6] == 1
local id = row[1]
local known = redis.call('HGET', dead, id)
if not known and is_repeat then
  local place = redis.call('HGET', places, id)
  return { place and not is_expired(place) and 'done' or 'gone' }
end
if known ~= letter then return { known and 'changed' or 'gone' } end
if is_full(1, max_pending) then return { 'full' } end
local holder = holder_of(row[7])
if holder then return { 'taken', holder } end
drop(dead, id)
remove(dead_ids, id)
if from_start then drop(checkpoints, id) end
replaced_places[id] = redis.call('HGET', places, id)
insert({ row })
send_wakeups()
return { 'done' }
