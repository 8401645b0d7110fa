-- Puts a dead letter's task back in the queue.
-- uses: request writes waking places inserting
-- keys: places dead letters checkpoints
-- request   3 the letter as it was read, 4 the row (see inserting), 5 max_pending or 0,
--           6 whether its checkpoint goes
-- returns   { 'done' }, { 'gone' } when the letter is another one or none, { 'full' },
--           { 'taken', holder } when its unique key is held
local letter, row, max_pending, from_start = request[3], request[4], request[5], request[6] == 1
local id = row[1]
local known = redis.call('HGET', dead, id)
if not known and is_repeat then
  local place = redis.call('HGET', places, id)
  return { place and not is_over(place) and 'done' or 'gone' }
end
if known ~= letter then return { known and 'changed' or 'gone' } end
if is_full(1, max_pending) then return { 'full' } end
local holder = holder_of(row[7])
if holder then return { 'taken', holder } end
drop(dead, id)
remove(letters, id)
if from_start then drop(checkpoints, id) end
making_way[id] = redis.call('HGET', places, id)
insert({ row })
send_wakes()
return { 'done' }
