-- Tasks in the order of their ids, or the last id first, as many as are wanted or as one call may
-- look at.
-- uses: request writes places
-- keys: places tasks states ended ids held success failed cancelled
-- request   3 the id before the first ('' for none), 4 how many, 5 status letter or '', 6 queue or '',
--           7 function or '', 8 whether the last id comes first, 9 how many may be looked at
-- returns   where to go on ('' at the end), then id, place, record, and state or end of each
local FEW = 5000
local after, limit, status, queue, func = request[3], request[4], request[5], request[6], request[7]
local is_back = request[8] == 1

local function comes_after(id)
  if is_back then return after == '' or id < after end
  return id > after
end

-- The ids of a status that has an index of its own, when there are few of them; else nil.
local function few_with_status()
  local set = KEPT[status] or (status == 'r' and held)
  if not set or redis.call('ZCARD', set) > FEW then return nil end
  local found = {}
  for _, member in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    local id = string.match(member, '([^/]*)$')
    if comes_after(id) then found[#found + 1] = id end
  end
  table.sort(found, is_back and function(one, other) return one > other end or nil)
  return found
end

local function is_wanted_at(place)
  if not place then return false end
  local start = string.find(place, '/', 1, true)
  if status ~= '' and string.sub(place, start + 55, start + 55) ~= status then return false end
  if queue ~= '' and string.sub(place, 2, start - 1) ~= queue then return false end
  return not is_over(place)
end

local page = few_with_status()
local is_all = page ~= nil
if not page then
  local from, size = after == '' and (is_back and '+' or '-') or '(' .. after, request[9]
  if func .. status .. queue == '' then size = math.min(size, limit) end
  local read, to = 'ZRANGEBYLEX', '+'
  if is_back then read, to = 'ZREVRANGEBYLEX', '-' end
  page = redis.call(read, ids, from, to, 'LIMIT', 0, size)
end

local answer, found = { '' }, 0
local at = get_all(places, page)
if #page > 0 and not is_all then answer[1] = page[#page] end
for position, id in ipairs(page) do
  if is_wanted_at(at[position]) then
    local record = redis.call('HGET', tasks, id)
    if record and (func == '' or string.sub(record, 1, #func + 1) == func .. ' ') then
      local is_ended = string.sub(at[position], 1, 1) == 'f'
      local state = redis.call('HGET', is_ended and ended or states, id)
      for _, value in ipairs({ id, at[position], record, state or '' }) do answer[#answer + 1] = value end
      found = found + 1
      if found == limit then
        answer[1] = id
        break
      end
    end
  end
end
return answer
