-- Collects changes to hashes, sorted sets and counters; `flush` writes them together.
-- The last change to a field or a member is the one that is written.
local VALUES_PER_COMMAND = 4000 -- Lua can pass some 8,000

local fields, members, count_changes = {}, {}, {}

local function table_of(tables, key)
  local found = tables[key]
  if not found then
    found = {}
    tables[key] = found
  end
  return found
end

local function put(key, field, value) table_of(fields, key)[field] = value end
local function drop(key, field) table_of(fields, key)[field] = false end
local function add(key, member, score) table_of(members, key)[member] = score or 0 end
local function remove(key, member) table_of(members, key)[member] = false end

-- Change the number of live tasks that a queue has in a status.
local function add_to_count(queue, status, by)
  local name = queue .. '/' .. status
  count_changes[name] = (count_changes[name] or 0) + by
end

local function call_all(command, key, values)
  for start = 1, #values, VALUES_PER_COMMAND do
    redis.call(command, key, unpack(values, start, math.min(start + VALUES_PER_COMMAND - 1, #values)))
  end
end

-- The values of these fields, in order; false where there is none.
local function get_all(key, names)
  if #names == 0 then return {} end
  if #names <= VALUES_PER_COMMAND then return redis.call('HMGET', key, unpack(names)) end
  local found = {}
  for start = 1, #names, VALUES_PER_COMMAND do
    local last = math.min(start + VALUES_PER_COMMAND - 1, #names)
    local part = redis.call('HMGET', key, unpack(names, start, last))
    for _, value in ipairs(part) do found[#found + 1] = value end
  end
  return found
end

local function write_all(tables, put_command, drop_command, is_set)
  for key, wanted in pairs(tables) do
    local removed, stored = {}, {}
    for name, value in pairs(wanted) do
      if value == false then
        removed[#removed + 1] = name
      else
        stored[#stored + 1] = is_set and value or name
        stored[#stored + 1] = is_set and name or value
      end
    end
    if #removed > 0 then call_all(drop_command, key, removed) end
    if #stored > 0 then call_all(put_command, key, stored) end
  end
end

local function flush()
  write_all(members, 'ZADD', 'ZREM', true)
  write_all(fields, 'HSET', 'HDEL', false)
  for name, by in pairs(count_changes) do
    if by ~= 0 and redis.call('HINCRBY', KEYS.counts, name, by) == 0 then
      redis.call('HDEL', KEYS.counts, name)
    end
  end
  fields, members, count_changes = {}, {}, {}
end
