-- The tasks that an owner holds, from the sorted set `held` of `owner/suspect/id`.
-- keys: held places tasks states
local function held_ids(owner)
  local found = {}
  for position, member in ipairs(redis.call('ZRANGEBYLEX', held, '[' .. owner .. '/', '(' .. owner .. '0')) do
    found[position] = string.match(member, '/([^/]*)$')
  end
  return found
end

-- Append id and place of each.
local function append_places(answer, owner)
  for _, id in ipairs(held_ids(owner)) do
    answer[#answer + 1] = id
    answer[#answer + 1] = redis.call('HGET', places, id) or ''
  end
end

-- Append id, place, record and state of each.
local function append_rows(answer, owner)
  for _, id in ipairs(held_ids(owner)) do
    for _, value in ipairs({
      id, redis.call('HGET', places, id) or '', redis.call('HGET', tasks, id) or '',
      redis.call('HGET', states, id) or '',
    }) do
      answer[#answer + 1] = value
    end
  end
end
