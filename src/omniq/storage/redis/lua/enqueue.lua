-- Stores new tasks, all or none.
-- uses: request writes wakeups places task_sets insert
-- keys: tasks nonces
-- request   3 nonce of the call, 4 max_pending or 0, 5 rows (see lib/insert),
--           6 whether a task may have expired before this call could be repeated;
--           if not, the rows may be those of several calls
-- returns   { 'taken', id }, { 'full' }, or { 'stored', id, … } with the id of the task for each row:
--           its own, or that of the task that holds its unique key
local nonce, max_pending, rows, has_short_ttl = request[3], request[4], request[5], request[6] == 1
local NONCE_SECONDS = 600 -- for which a nonce is stored

-- The tasks of the first call may have run and left no record.
local was_done = is_repeat and has_short_ttl and redis.call('ZSCORE', nonces, nonce)

local answer, fresh, keys = { 'stored' }, {}, {}
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
  if has_short_ttl then
    redis.call('ZADD', nonces, now, nonce)
    redis.call('ZREMRANGEBYSCORE', nonces, '-inf', now - NONCE_SECONDS * 1000000)
    redis.call('EXPIRE', nonces, NONCE_SECONDS)
  end
  send_wakeups()
end
return answer
