-- Inserts tasks: checks ids, unique keys and the limit of waiting tasks, and numbers them in order.
-- keys: places tasks states ended ids ready suspects parked delayed conditions unique dead sequence
--
-- A row is { id, record, queue, rank, flags, token, unique, conditions, state }; its rank is the order
-- without the sequence, and a value that it does not have is ''.

local replaced_places = {} -- id → the place of an expired or dead task that a new task replaces

-- The stored record of each id; false when the id is free.
local function records_of(rows)
  local row_ids = {}
  for position, row in ipairs(rows) do row_ids[position] = row[1] end
  local found = get_all(tasks, row_ids)
  for position, record in ipairs(found) do
    if record then
      local place = redis.call('HGET', places, row_ids[position])
      local is_gone = not place or is_expired(place)
      if is_gone and redis.call('HEXISTS', dead, row_ids[position]) == 0 then
        found[position] = false
        replaced_places[row_ids[position]] = place
      end
    end
  end
  return found
end

-- A record begins with its function, the length of its nonce, and the nonce.
local function nonce_of(record)
  local length, start = string.match(record, '^[^ ]+ (%d+) ()')
  return string.sub(record, start, start + length - 1)
end

local function holder_of(key)
  return key ~= '' and redis.call('HGET', unique, key)
end

-- Whether that many more tasks would exceed the limit; 0 is no limit.
local function is_full(more, max_pending)
  if max_pending == 0 or more == 0 then return false end
  local waiting = 0
  for _, set in ipairs({ ready, suspects, parked, delayed }) do
    waiting = waiting + redis.call('ZCARD', set)
  end
  return waiting + more > max_pending
end

-- Remove what is left of a task that had the same id.
local function remove_replaced(id)
  if replaced_places[id] then
    remove_from_sets(id, replaced_places[id])
    drop(ended, id)
  end
end

local function put_optional(id, key, row_conditions, state)
  if key ~= '' then put(unique, key, id) end
  if row_conditions ~= '' then put(conditions, id, row_conditions) end
  if state ~= '' then put(states, id, state) end
end

-- Store the rows, in order.
local function insert(rows)
  local number = redis.call('INCRBY', sequence, #rows) - #rows
  local first_due -- read for the first row that is not due yet
  local records, new_places, index, due_now, due_later = {}, {}, {}, {}, {}
  for position, row in ipairs(rows) do
    local id, record, queue, rank, flags, token, key, row_conditions, state = unpack(row)
    local core = queue .. '/' .. rank .. string.format('%016.0f', number + position) .. flags .. token
    local member, due = core .. '/' .. id, string.sub(rank, DUE_FIRST)
    remove_replaced(id)
    put_optional(id, key, row_conditions, state)
    records[2 * position - 1], records[2 * position] = id, record
    new_places[2 * position - 1], new_places[2 * position] = id, 'r' .. core .. '/'
    index[2 * position - 1], index[2 * position] = 0, id
    add_to_count(queue, 'p', 1)
    if flag(flags, VISIBLE_FLAG) == '0' or due <= now_stamp then
      due_now[#due_now + 1] = 0
      due_now[#due_now + 1] = member
      add_claimable(queue, 1)
    else
      due_later[#due_later + 1] = 0
      due_later[#due_later + 1] = due .. 'r' .. member
      first_due = first_due or redis.call('ZRANGEBYLEX', delayed, '-', '+', 'LIMIT', 0, 1)[1] or '~'
      if due < first_due then
        -- A worker that waits until the first task comes due has to wait for this one now.
        first_due = due
        add_claimable(queue, 0)
      end
    end
  end
  flush()
  call_all('HSET', tasks, records)
  call_all('HSET', places, new_places)
  call_all('ZADD', ids, index)
  call_all('ZADD', ready, due_now)
  call_all('ZADD', delayed, due_later)
end
