-- Moves a part of what `prepare` has set aside to where it belongs now.
-- uses: request writes wakeups places lanes task_sets documents
-- keys: tasks places states ended ids dead dead_ids dead_times
-- keys: moved_tasks moved_places moved_states moved_ended moved_dead moved_unique moved_checkpoints
-- keys: moved_progress moved_newest moved_gates moved_schedules
-- request   3 rows: { id, place as read, new place, record, state or '', record of its end or '' };
--           4 dead letters: { id, letter as read, new letter, time of its failure, record };
--           5 documents: { kind, field, value as read, change (see lib/documents) }
-- What another process has moved meanwhile is left out.
local SOURCES = {
  unique = moved_unique, checkpoint = moved_checkpoints, progress = moved_progress, newest = moved_newest,
  gate = moved_gates, schedule = moved_schedules,
}

for _, row in ipairs(request[3]) do
  local id, from, place, record, state, end_record = unpack(row)
  if redis.call('HGET', moved_places, id) == from then
    if redis.call('HEXISTS', places, id) == 0 then
      add_to_sets(id, place)
      put(tasks, id, record)
      add(ids, id)
      if state ~= '' then put(states, id, state) end
      if end_record ~= '' then put(ended, id, end_record) end
    end
    redis.call('HDEL', moved_places, id)
    redis.call('HDEL', moved_states, id)
    redis.call('HDEL', moved_ended, id)
    if redis.call('HEXISTS', moved_dead, id) == 0 then redis.call('HDEL', moved_tasks, id) end
  end
end
for _, letter in ipairs(request[4]) do
  local id, from, stored, failed_at, record = unpack(letter)
  if redis.call('HGET', moved_dead, id) == from then
    put(dead, id, stored)
    add(dead_ids, id)
    add(dead_times, id, failed_at)
    if redis.call('HEXISTS', tasks, id) == 0 then put(tasks, id, record) end
    redis.call('HDEL', moved_dead, id)
    redis.call('HDEL', moved_tasks, id)
  end
end
for _, document in ipairs(request[5]) do
  local kind, field, from, change = unpack(document)
  if redis.call('HGET', SOURCES[kind], field) == from then
    apply_document(change)
    redis.call('HDEL', SOURCES[kind], field)
  end
end
flush()
update_heads()
return 'OK'
