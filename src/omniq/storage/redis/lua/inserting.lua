-- How tasks get in: ids and unique keys that are taken, the bound on what may wait, and the order.
-- keys: places tasks states ended ids ready suspects parked delayed terms unique dead sequence
--
-- A row is { id, record, queue, rank, flags, token, unique, terms, state }; its rank is the order
-- without the sequence, and what is not there is ''.

local making_way = {} -- id → the place of a record that a new task replaces

-- What is on record under each id: its record, or false when the id is free.
local function records_of(rows)
  local asked = {}
  for position, row in ipairs(rows) do asked[position] = row[1] end
  local found = get_all(tasks, asked)
  for position, record in ipairs(found) do
    if record then
      local place = redis.call('HGET', places, asked[position])
      local is_gone = not place or is_over(place)
      if is_gone and redis.call('HEXISTS', dead, asked[position]) == 0 then
        found[position] = false
        making_way[asked[position]] = place
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

-- Whether so many more tasks would be too many; 0 is no bound.
local function is_full(more, max_pending)
  if max_pending == 0 or more == 0 then return false end
  local waiting = 0
  for _, set in ipairs({ ready, suspects, parked, delayed }) do
    waiting = waiting + redis.call('ZCARD', set)
  end
  return waiting + more > max_pending
end

-- Make room for a task where a record with its id is left.
local function replace_old(id)
  if making_way[id] then
    unfile(id, making_way[id])
    drop(ended, id)
  end
end

local function keep_beside(id, key, row_terms, state)
  if key ~= '' then put(unique, key, id) end
  if row_terms ~= '' then put(terms, id, row_terms) end
  if state ~= '' then put(states, id, state) end
end

-- Keep the rows, in order.
local function insert(rows)
  local number = redis.call('INCRBY', sequence, #rows) - #rows
  local first_due -- looked up for the first row that is not due yet
  local records, at, index, due_now, due_later = {}, {}, {}, {}, {}
  for position, row in ipairs(rows) do
    local id, record, queue, rank, flags, token, key, row_terms, state = unpack(row)
    local core = queue .. '/' .. rank .. string.format('%016.0f', number + position) .. flags .. token
    local member, due = core .. '/' .. id, string.sub(rank, 21)
    replace_old(id)
    keep_beside(id, key, row_terms, state)
    records[2 * position - 1], records[2 * position] = id, record
    at[2 * position - 1], at[2 * position] = id, 'r' .. core .. '/'
    index[2 * position - 1], index[2 * position] = 0, id
    count(queue, 'p', 1)
    if string.sub(flags, 2, 2) == '0' or due <= now_stamp then
      due_now[#due_now + 1] = 0
      due_now[#due_now + 1] = member
      wake(queue, 1)
    else
      due_later[#due_later + 1] = 0
      due_later[#due_later + 1] = due .. 'r' .. member
      first_due = first_due or redis.call('ZRANGEBYLEX', delayed, '-', '+', 'LIMIT', 0, 1)[1] or '~'
      if due < first_due then
        -- Whoever waits for the first task to come due has to wait for another one now.
        first_due = due
        wake(queue, 0)
      end
    end
  end
  flush()
  call_all('HSET', tasks, records)
  call_all('HSET', places, at)
  call_all('ZADD', ids, index)
  call_all('ZADD', ready, due_now)
  call_all('ZADD', delayed, due_later)
end
