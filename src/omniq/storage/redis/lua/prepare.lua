-- Makes the store ready for use. Tasks in the layout of version 1 are set aside for `upgrade`, and its keys
-- closed: a worker of that version gets an error, instead of a second queue beside this one.
-- uses: request writes documents
-- keys: documents leases workers sequence
-- keys: old_tasks old_places old_states old_ended old_dead old_unique old_checkpoints old_progress old_newest
-- keys: old_gates old_schedules old_leases old_ready old_paused old_workers old_resting old_sequence
-- keys: moved_tasks moved_places moved_states moved_ended moved_dead moved_unique moved_checkpoints
-- keys: moved_progress moved_newest moved_gates moved_schedules
-- request   3 the document of a new store, 4 what a closed key says
-- returns   now; the document of the store; whether something is left to upgrade
local known = redis.call('HGET', documents, 'store/store')

local function move(from, to, kind)
  if redis.call('TYPE', from).ok == kind and redis.call('EXISTS', to) == 0 then redis.call('RENAME', from, to) end
end

-- Workers, paused queues and the sequence are few.
local function move_small_keys()
  if redis.call('TYPE', old_workers).ok == 'hash' then
    local found = redis.call('HGETALL', old_workers)
    for position = 1, #found, 2 do
      local paused = redis.call('SISMEMBER', old_resting, found[position])
      redis.call('HSET', workers, found[position], paused .. '/0/0/0/' .. found[position + 1])
    end
  end
  if redis.call('TYPE', old_paused).ok == 'set' then
    for _, queue in ipairs(redis.call('SMEMBERS', old_paused)) do
      apply_document({ 'paused_queue/' .. queue, 0, '', 1, '', '' })
    end
  end
  move(old_sequence, sequence, 'string')
  redis.call('DEL', old_workers, old_resting, old_paused)
end

if not known then
  move(old_leases, leases, 'zset')
  for _, pair in ipairs({
    { old_tasks, moved_tasks }, { old_places, moved_places }, { old_states, moved_states },
    { old_ended, moved_ended }, { old_dead, moved_dead }, { old_unique, moved_unique },
    { old_checkpoints, moved_checkpoints }, { old_progress, moved_progress }, { old_newest, moved_newest },
    { old_gates, moved_gates }, { old_schedules, moved_schedules },
  }) do
    move(pair[1], pair[2], 'hash')
  end
  if redis.call('EXISTS', moved_places, moved_schedules, old_workers) > 0 then move_small_keys() end
  -- It follows from the places.
  if redis.call('TYPE', old_ready).ok == 'zset' then redis.call('UNLINK', old_ready) end
  for _, key in ipairs({ old_places, old_tasks, old_leases, old_ready, old_schedules, old_dead, old_paused }) do
    redis.call('SET', key, request[4], 'NX')
  end
  apply_document({ 'store/store', 0, '', 1, request[3], '' })
  flush()
  known = '/' .. request[3]
end
return { now_text, string.sub(known, 2), redis.call('EXISTS', moved_tasks, moved_places, moved_states, moved_ended, moved_dead,
  moved_unique, moved_checkpoints, moved_progress, moved_newest, moved_gates, moved_schedules) }
