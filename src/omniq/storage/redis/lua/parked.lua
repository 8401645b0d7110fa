-- Reads the first parked rows of each gate, queue and function, suspects and others apart.
-- uses: request writes rows
-- request   3 names of gates, 4 how many of each
-- returns   now, then the rows
local limit, answer, found = request[4], { now_text }, {}

-- Append the ids of the first rows of each lot of a gate.
local function add_first(gate)
  local from, beyond = '[' .. gate .. '/', '(' .. gate .. '0'
  while true do
    local page = redis.call('ZRANGEBYLEX', KEYS.parked, from, beyond, 'LIMIT', 0, limit)
    local lot, count
    for _, member in ipairs(page) do
      local its_lot, id = string.match(member, '^([^/]*/[^/]*/[^/]*)/.*/([^/]*)$')
      if its_lot ~= lot then lot, count = its_lot, 0 end
      count = count + 1
      found[#found + 1] = id
    end
    if #page < limit then return end
    if count == limit then
      -- All of one lot, which may have more; '0' comes right after '/'.
      from = '[' .. lot .. '0'
    else
      -- The last lot is read again from its start.
      for _ = 1, count do found[#found] = nil end
      from = '[' .. lot .. '/'
    end
  end
end

for _, gate in ipairs(request[3]) do add_first(gate) end
append_rows(answer, found, get_all(KEYS.places, found), true)
return answer
