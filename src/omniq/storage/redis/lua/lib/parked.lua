-- The parked tasks of a gate.

-- Append the members of `parked` that are the first `limit` of each lot of a gate, and their ids. A lot has the
-- rows of one queue and function, suspects and others apart.
local function add_parked(found, found_ids, gate, limit)
  local from, beyond = '[' .. gate .. '/', '(' .. gate .. '0'
  while true do
    local page = redis.call('ZRANGEBYLEX', KEYS.parked, from, beyond, 'LIMIT', 0, limit)
    local lot, count
    for _, member in ipairs(page) do
      local its_lot = string.match(member, '^[^/]*/[^/]*/[^/]*')
      if its_lot ~= lot then lot, count = its_lot, 0 end
      count = count + 1
      local size = #found + 1
      found[size], found_ids[size] = member, string.sub(member, #lot + ORDER_LAST - ORDER_FIRST + 4)
    end
    if #page < limit then return end
    if count == limit then
      -- All of one lot, which may have more; '0' comes right after '/'.
      from = '[' .. lot .. '0'
    else
      -- The last lot is read again from its start.
      for _ = 1, count do found[#found], found_ids[#found] = nil, nil end
      from = '[' .. lot .. '/'
    end
  end
end
