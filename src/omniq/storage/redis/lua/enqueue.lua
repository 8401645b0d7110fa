-- Keeps new tasks, all or none.
-- uses: request writes waking places inserting
-- keys: tasks nonces
-- request   3 nonce of the call, 4 max_pending or 0, 5 rows (see inserting),
--           6 whether a task may be gone again before this call could be repeated;
--           if not, the rows may be those of several calls
-- returns   { 'taken', id }, { 'full' }, or { 'kept', id, … } with the id that stands for each row
local nonce, max_pending, rows, is_brief = request[3], request[4], request[5], request[6] == 1
local NONCE_KEPT = 600 -- seconds

-- What the first call enqueued may have run and left nothing behind.
local was_done = is_repeat and is_brief and redis.call('ZSCORE', nonces, nonce)

local answer, fresh, keys = { 'kept' }, {}, {}
local known = records_of(rows)
for position, row in ipairs(rows) do
  local id, key = row[1], row[7]
  local holder = holder_of(key) or keys[key]
  if known[position] and nonce_of(known[position]) ~= nonce_of(row[2]) then return { 'taken', id } end
  if known[position] or was_done or not holder then
    answer[#answer + 1] = id
  else
    answer[#answer + 1] = holder
  end
  if not (known[position] or was_done or holder) then
    fresh[#fresh + 1] = row
    if key ~= '' then keys[key] = id end
  end
end
if is_full(#fresh, max_pending) then return { 'full' } end
if #fresh > 0 then
  insert(fresh)
  if is_brief then
    redis.call('ZADD', nonces, now, nonce)
    redis.call('ZREMRANGEBYSCORE', nonces, '-inf', now - NONCE_KEPT * 1000000)
    redis.call('EXPIRE', nonces, NONCE_KEPT)
  end
  send_wakes()
end
return answer
