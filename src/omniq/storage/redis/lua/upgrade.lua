-- Moves a part of what `prepare` has set aside to where it belongs now.
-- uses: request writes wakeups places heads lanes task_sets documents
-- request   3 rows: { id, place as read, new place, record, state or '', record of its end or '' };
--           4 dead letters: { id, letter as read, new letter, time of its failure, record };
--           5 documents: { kind, field, value as read, change (see lib/documents) }
-- What another process has moved meanwhile is left out.
local SOURCES = {
  unique = KEYS.moved_unique, checkpoint = KEYS.moved_checkpoints, progress = KEYS.moved_progress, newest = KEYS.moved_newest,
  gate = KEYS.moved_gates, schedule = KEYS.moved_schedules,
}

for _, row in ipairs(request[3]) do
  local id, from, place, record, state, end_record = unpack(row)
  if redis.call('HGET', KEYS.moved_places, id) == from then
    if redis.call('HEXISTS', KEYS.places, id) == 0 then
      add_to_sets(id, place)
      put(KEYS.tasks, id, record)
      add(KEYS.ids, id)
      if state ~= '' then put(KEYS.states, id, state) end
      if end_record ~= '' then put(KEYS.ended, id, end_record) end
    end
    redis.call('HDEL', KEYS.moved_places, id)
    redis.call('HDEL', KEYS.moved_states, id)
    redis.call('HDEL', KEYS.moved_ended, id)
    if redis.call('HEXISTS', KEYS.moved_dead, id) == 0 then redis.call('HDEL', KEYS.moved_tasks, id) end
  end
end
for _, letter in ipairs(request[4]) do
  local id, from, stored, failed_at, record = unpack(letter)
  if redis.call('HGET', KEYS.moved_dead, id) == from then
    put(KEYS.dead, id, stored)
    add(KEYS.dead_ids, id)
    add(KEYS.dead_times, id, failed_at)
    if redis.call('HEXISTS', KEYS.tasks, id) == 0 then put(KEYS.tasks, id, record) end
    redis.call('HDEL', KEYS.moved_dead, id)
    redis.call('HDEL', KEYS.moved_tasks, id)
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
