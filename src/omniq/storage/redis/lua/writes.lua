-- Changes to hashes, sorted sets and counters, gathered as they are made and written together.
-- The last word about a field or a member is the one that is written.
-- keys: counts
local AT_ONCE = 4000 -- values in one command; Lua can pass some 8,000

local fields, members, changes = {}, {}, {}

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

-- How many live tasks a queue has in a status.
local function count(queue, status, by)
  local name = queue .. '/' .. status
  changes[name] = (changes[name] or 0) + by
end

local function call_all(command, key, values)
  for start = 1, #values, AT_ONCE do
    redis.call(command, key, unpack(values, start, math.min(start + AT_ONCE - 1, #values)))
  end
end

-- The values of these fields, in order; false where there is none.
local function get_all(key, names)
  if #names == 0 then return {} end
  if #names <= AT_ONCE then return redis.call('HMGET', key, unpack(names)) end
  local found = {}
  for start = 1, #names, AT_ONCE do
    local part = redis.call('HMGET', key, unpack(names, start, math.min(start + AT_ONCE - 1, #names)))
    for _, value in ipairs(part) do found[#found + 1] = value end
  end
  return found
end

local function write_all(tables, put_command, drop_command, is_set)
  for key, wanted in pairs(tables) do
    local gone, here = {}, {}
    for name, value in pairs(wanted) do
      if value == false then
        gone[#gone + 1] = name
      else
        here[#here + 1] = is_set and value or name
        here[#here + 1] = is_set and name or value
      end
    end
    if #gone > 0 then call_all(drop_command, key, gone) end
    if #here > 0 then call_all(put_command, key, here) end
  end
end

local function flush()
  write_all(members, 'ZADD', 'ZREM', true)
  write_all(fields, 'HSET', 'HDEL', false)
  for name, by in pairs(changes) do
    if by ~= 0 and redis.call('HINCRBY', counts, name, by) == 0 then
      redis.call('HDEL', counts, name)
    end
  end
  fields, members, changes = {}, {}, {}
end
