-- Notify the callers that await one of these tasks that it has ended.
local function notify_ended(ended_ids)
  if #ended_ids == 0 or redis.call('EXISTS', KEYS.awaited) == 0 then return end
  local notified = {}
  for _, id in ipairs(ended_ids) do
    if redis.call('SREM', KEYS.awaited, id) == 1 then notified[#notified + 1] = id end
  end
  if #notified > 0 then redis.call('PUBLISH', KEYS.awaited, table.concat(notified, ' ')) end
end
