-- Reads the first parked rows of each gate, queue and function, suspects and others apart.
-- uses: request writes rows
-- request   3 names of gates, 4 how many of each
-- returns   now, then the rows
local answer = { now_text }
for _, gate in ipairs(request[3]) do
  local from, beyond = '[' .. gate .. '/', '(' .. gate .. '0'
  while true do
    local first = redis.call('ZRANGEBYLEX', KEYS.parked, from, beyond, 'LIMIT', 0, 1)[1]
    if not first then break end
    -- '0' comes right after '/'.
    local lane = string.match(first, '^[^/]*/[^/]*/[^/]*')
    local found = redis.call('ZRANGEBYLEX', KEYS.parked, '[' .. lane .. '/', '(' .. lane .. '0', 'LIMIT', 0, request[4])
    for position, member in ipairs(found) do found[position] = string.match(member, '/([^/]*)$') end
    append_rows(answer, found, get_all(KEYS.places, found), true)
    from = '[' .. lane .. '0'
  end
end
return answer
