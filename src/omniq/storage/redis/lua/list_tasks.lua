-- Reads tasks in the order of their ids, or in the reverse order, up to a limit of tasks read and of
-- places checked.
-- uses: request writes places rows sorting
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
  local set = ({ s = KEYS.succeeded, f = KEYS.failed, c = KEYS.cancelled, r = KEYS.held })[status]
  if not set or not SORTS_BYTES or redis.call('ZCARD', set) > FEW then return nil end
  local found = {}
  for _, member in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    local id = string.match(member, '^.*/(.*)$') or member
    if comes_after(id) then found[#found + 1] = id end
  end
  table.sort(found, is_reversed and function(one, other) return one > other end or nil)
  return found
end

local function matches(place)
  if not place or is_expired(place) then return false end
  if status ~= '' and string.sub(place, STATUS, STATUS) ~= status then return false end
  if queue .. func == '' then return true end
  local _, its_queue, its_func = split_place(place)
  return (queue == '' or queue == its_queue) and (func == '' or func == its_func)
end

local page = few_with_status()
local is_complete = page ~= nil
if not page then
  local from, size = after == '' and (is_reversed and '+' or '-') or '(' .. after, request[9]
  if func .. status .. queue == '' then size = math.min(size, limit) end
  local command, to = 'ZRANGEBYLEX', '+'
  if is_reversed then command, to = 'ZREVRANGEBYLEX', '-' end
  page = redis.call(command, KEYS.ids, from, to, 'LIMIT', 0, size)
end

local found, found_places, reached = {}, {}, nil
for position, place in ipairs(get_all(KEYS.places, page)) do
  if matches(place) then
    found[#found + 1], found_places[#found_places + 1] = page[position], place
    if #found == limit then
      reached = page[position]
      break
    end
  end
end
local answer = { reached or (not is_complete and page[#page]) or '' }
append_rows(answer, found, found_places, true)
for position = 2, #answer, 4 do
  if is_finished(answer[position + 1]) then
    answer[position + 3] = fitting(redis.call('HGET', KEYS.ended, answer[position]) or '')
  end
end
return answer
