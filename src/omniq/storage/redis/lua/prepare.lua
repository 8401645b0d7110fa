-- Makes the store ready for use. Tasks in the layout of version 1 are set aside for `upgrade`, and its keys
-- closed: a worker of that version gets an error, instead of a second queue beside this one.
-- uses: request writes documents
-- request   3 the document of a new store, 4 what a closed key says, 5 the due time of that document
-- returns   now; the document of the store; whether something is left to upgrade
local known = redis.call('HGET', KEYS.documents, 'store/store')

local function move(from, to, kind)
  if redis.call('TYPE', from).ok == kind and redis.call('EXISTS', to) == 0 then redis.call('RENAME', from, to) end
end

-- Workers, paused queues and the sequence are few.
local function move_small_keys()
  if redis.call('TYPE', KEYS.old_workers).ok == 'hash' then
    local found = redis.call('HGETALL', KEYS.old_workers)
    for position = 1, #found, 2 do
      local paused = redis.call('SISMEMBER', KEYS.old_resting, found[position])
      redis.call('HSET', KEYS.workers, found[position], paused .. '/0/0/0/' .. found[position + 1])
    end
  end
  if redis.call('TYPE', KEYS.old_paused).ok == 'set' then
    for _, queue in ipairs(redis.call('SMEMBERS', KEYS.old_paused)) do
      apply_document({ 'paused_queue/' .. queue, 0, '', 1, '', '' })
    end
  end
  move(KEYS.old_sequence, KEYS.sequence, 'string')
  redis.call('DEL', KEYS.old_workers, KEYS.old_resting, KEYS.old_paused)
end

if not known then
  move(KEYS.old_leases, KEYS.leases, 'zset')
  for _, pair in ipairs({
    { KEYS.old_tasks, KEYS.moved_tasks }, { KEYS.old_places, KEYS.moved_places }, { KEYS.old_states, KEYS.moved_states },
    { KEYS.old_ended, KEYS.moved_ended }, { KEYS.old_dead, KEYS.moved_dead }, { KEYS.old_unique, KEYS.moved_unique },
    { KEYS.old_checkpoints, KEYS.moved_checkpoints }, { KEYS.old_progress, KEYS.moved_progress }, { KEYS.old_newest, KEYS.moved_newest },
    { KEYS.old_gates, KEYS.moved_gates }, { KEYS.old_schedules, KEYS.moved_schedules },
  }) do
    move(pair[1], pair[2], 'hash')
  end
  if redis.call('EXISTS', KEYS.moved_places, KEYS.moved_schedules, KEYS.old_workers) > 0 then move_small_keys() end
  -- It follows from the places.
  if redis.call('TYPE', KEYS.old_ready).ok == 'zset' then redis.call('UNLINK', KEYS.old_ready) end
  for _, key in ipairs({ KEYS.old_places, KEYS.old_tasks, KEYS.old_leases, KEYS.old_ready, KEYS.old_schedules, KEYS.old_dead, KEYS.old_paused }) do
    redis.call('SET', key, request[4], 'NX')
  end
  apply_document({ 'store/store', 0, '', 1, request[3], request[5] })
  flush()
  known = request[5] .. '/' .. request[3]
end
return { now_text, string.match(known, '/(.*)$'), redis.call('EXISTS', KEYS.moved_tasks, KEYS.moved_places, KEYS.moved_states, KEYS.moved_ended, KEYS.moved_dead,
  KEYS.moved_unique, KEYS.moved_checkpoints, KEYS.moved_progress, KEYS.moved_newest, KEYS.moved_gates, KEYS.moved_schedules) }
