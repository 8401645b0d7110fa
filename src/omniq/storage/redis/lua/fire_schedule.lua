-- Replaces a schedule, if it has not changed since it was read, and enqueues its task.
-- uses: request writes wakeups places task_sets insert
-- keys: schedules
-- request   3 id, 4 version as it was read, 5 nonce of the call, 6 the new schedule,
--           7 max_pending or 0, 8 the row (see lib/insert) or 0
-- returns   'done', 'changed', or 'full'
local id, version, nonce, row = request[3], request[4], request[5], request[8]
local known = redis.call('HGET', schedules, id)
if known and string.match(known, '^%d+/([^/]*)/') == nonce then return 'done' end
if not known or tonumber(string.match(known, '^%d+')) ~= version then return 'changed' end
if row ~= 0 and not records_of({ row })[1] and not holder_of(row[7]) then
  if is_full(1, request[7]) then return 'full' end
  insert({ row })
  send_wakeups()
end
redis.call('HSET', schedules, id, string.format('%.0f', version + 1) .. '/' .. nonce .. '/' .. request[6])
return 'done'
