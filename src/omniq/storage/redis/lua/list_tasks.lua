-- Reads tasks in the order of their ids, or in the reverse order, up to a limit of tasks read and of
-- places checked.
-- uses: request writes places task_sets
-- keys: places tasks states ended ids held success failed cancelled
-- request   3 the id before the first ('' for none), 4 how many, 5 status letter or '', 6 queue or '',
--           7 function or '', 8 whether the order is reversed, 9 how many places to check at most
-- returns   the id to continue after ('' at the end), then id, place, record, and state or end of each
local FEW = 5000
local after, limit, status, queue, func = request[3], request[4], request[5], request[6], request[7]
local is_reversed = request[8] == 1

local function comes_after(id)
  if is_reversed then return after == '' or id < after end
  return id > after
end

-- The ids of a status that has a dedicated sorted set, when there are few of them; else nil.
local function few_with_status()
  local set = FINISHED_SETS[status] or (status == 'r' and held)
  if not set or redis.call('ZCARD', set) > FEW then return nil end
  local found = {}
  for _, member in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    local id = string.match(member, '([^/]*)$')
    if comes_after(id) then found[#found + 1] = id end
  end
  table.sort(found, is_reversed and function(one, other) return one > other end or nil)
  return found
end

local function matches(place)
  if not place then return false end
  local start = string.find(place, '/', 1, true)
  local its_status = string.sub(place, start + STATUS_AT, start + STATUS_AT)
  if status ~= '' and its_status ~= status then return false end
  if queue ~= '' and string.sub(place, 2, start - 1) ~= queue then return false end
  return not is_expired(place)
end

local page = few_with_status()
local is_complete = page ~= nil
if not page then
  local from, size = after == '' and (is_reversed and '+' or '-') or '(' .. after, request[9]
  if func .. status .. queue == '' then size = math.min(size, limit) end
  local command, to = 'ZRANGEBYLEX', '+'
  if is_reversed then command, to = 'ZREVRANGEBYLEX', '-' end
  page = redis.call(command, ids, from, to, 'LIMIT', 0, size)
end

local answer, found = { '' }, 0
local places_found = get_all(places, page)
if #page > 0 and not is_complete then answer[1] = page[#page] end
for position, id in ipairs(page) do
  local place = places_found[position]
  if matches(place) then
    local record = redis.call('HGET', tasks, id)
    if record and (func == '' or string.sub(record, 1, #func + 1) == func .. ' ') then
      local state = redis.call('HGET', is_finished(place) and ended or states, id)
      for _, value in ipairs({ id, place, record, state or '' }) do answer[#answer + 1] = value end
      found = found + 1
      if found == limit then
        answer[1] = id
        break
      end
    end
  end
end
return answer
