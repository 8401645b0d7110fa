-- The first ready tasks in the order of claims, and the tasks that come due.
local MOVED_PER_CALL = 1000
local FIRST_PAGE = 8
local FEW_HEADS = 32
local ORDER_SIZE = ORDER_LAST - ORDER_FIRST + 1

-- Move tasks that have come due to where claims find them; false when there are more of them.
local function move_due(due_by)
  local due = redis.call('ZRANGEBYLEX', KEYS.delayed, '-', '[' .. due_by .. '~', 'LIMIT', 0, MOVED_PER_CALL)
  if #due == 0 then return true end
  local due_ids = {}
  for position, member in ipairs(due) do due_ids[position] = string.match(member, '/(.*)$') end
  for position, place in ipairs(get_all(KEYS.places, due_ids)) do
    remove(KEYS.delayed, due[position])
    if place then
      local _, queue, func, _, tail = split_place(place)
      add_claimable_row(due_ids[position], place, queue, func, tail)
    end
  end
  flush()
  update_heads()
  -- Claiming now could take a task before one of higher priority that is not moved yet.
  return #due < MOVED_PER_CALL
end

-- The functions of the members `<start><function>/…` of a set, of those that are runnable:
-- { modules or 0 for all, names, excluded names }.
local function functions_in(set, start, runnable)
  local is_found, functions = {}, {}
  local function scan(from, beyond)
    while true do
      local first = redis.call('ZRANGEBYLEX', set, from, beyond, 'LIMIT', 0, 1)[1]
      if not first then return end
      local func = string.match(first, '^[^/]*', #start + 1)
      is_found[func] = true
      -- '0' comes right after '/', which comes right after '.'.
      from = '[' .. start .. func .. '0'
    end
  end
  if runnable[1] == 0 then
    scan('[' .. start, start == '' and '+' or '(' .. string.sub(start, 1, -2) .. '0')
  else
    for _, module in ipairs(runnable[1]) do
      scan('[' .. start .. module .. '.', '(' .. start .. module .. '/')
    end
    for _, name in ipairs(runnable[2]) do
      local from, beyond = '[' .. start .. name .. '/', '(' .. start .. name .. '0'
      if redis.call('ZRANGEBYLEX', set, from, beyond, 'LIMIT', 0, 1)[1] then is_found[name] = true end
    end
  end
  for _, name in ipairs(runnable[3]) do is_found[name] = nil end
  for func in pairs(is_found) do functions[#functions + 1] = func end
  return functions
end

-- A source is a range of a sorted set in the order of claims: a lane, or the heads of a function's lanes.
-- `order` is that of its next member, nil at the end. A source of one head has no set: `lane` names the lane.
-- Nor has a source of members that are not in the set yet.
local sources
local lane_sources = {} -- lane → its source

local function read_next(source)
  source.position = source.position + 1
  if source.position > #source.page then
    source.page, source.position = {}, 1
    if not source.is_last then
      source.page = redis.call('ZRANGEBYLEX', source.set, source.from, source.beyond, 'LIMIT', 0, source.size)
      source.is_last = #source.page < source.size
      source.from = '(' .. (source.page[#source.page] or '')
      source.size = 2 * source.size
    end
  end
  source.member = source.page[source.position]
  -- Digits only: they compare alike in every locale.
  source.order = source.member and string.sub(source.member, #source.prefix + 1, #source.prefix + ORDER_SIZE)
end

local function add_source(set, prefix, from, size, func)
  local source = {
    set = set, prefix = prefix, from = from, beyond = '(' .. string.sub(prefix, 1, -2) .. '0',
    size = size, func = func, page = {}, position = 0, is_last = false,
  }
  read_next(source)
  if source.order then sources[#sources + 1] = source end
  return source
end

local function add_members(lane, list)
  local source = { prefix = lane, page = list, position = 0, is_last = true }
  read_next(source)
  sources[#sources + 1] = source
end

local function add_lane(lane, after, size)
  local from = '[' .. lane .. (after == '' and '' or after .. '0')
  lane_sources[lane] = add_source(KEYS.ready, lane, from, size)
end

-- Begin with the heads of all lanes of runnable functions, if there are few lanes; false if not.
local function add_few_heads(runnable)
  local few = redis.call('ZRANGE', KEYS.heads, 0, FEW_HEADS)
  if #few > FEW_HEADS then return false end
  local is_module, is_name, is_excluded = {}, {}, {}
  for _, module in ipairs(runnable[1] ~= 0 and runnable[1] or {}) do is_module[module] = true end
  for _, name in ipairs(runnable[2]) do is_name[name] = true end
  for _, name in ipairs(runnable[3]) do is_excluded[name] = true end

  local function is_runnable(func)
    if is_excluded[func] then return false end
    if runnable[1] == 0 or is_name[func] then return true end
    local dot = string.find(func, '.', 1, true)
    while dot do
      if is_module[string.sub(func, 1, dot - 1)] then return true end
      dot = string.find(func, '.', dot + 1, true)
    end
    return false
  end

  for _, head in ipairs(few) do
    local func, order, queue = string.match(head, '^([^/]*)/(%d+)/(.*)$')
    if is_runnable(func) then
      sources[#sources + 1] = { order = order, queue = queue, lane = queue .. '/' .. func .. '/' }
    end
  end
  return true
end

-- Begin to read. `wanted` is { queues or 0, paused queues, runnable, whether suspects are wanted };
-- `after` the order behind which to begin, or ''.
local function begin_candidates(wanted, after, limit)
  local queues, runnable = wanted[1], wanted[3]
  sources = {}
  if queues == 0 then
    if add_few_heads(runnable) then return end
    for _, func in ipairs(functions_in(KEYS.heads, '', runnable)) do
      add_source(KEYS.heads, func .. '/', '[' .. func .. '/', FIRST_PAGE, func)
    end
    return
  end
  for _, queue in ipairs(queues) do
    if not has(wanted[2], queue) then
      for suspect = 0, wanted[4] do
        local start = suspect .. queue .. '/'
        local functions = functions_in(KEYS.ready, start, runnable)
        local size = #queues == 1 and #functions == 1 and limit or FIRST_PAGE
        for _, func in ipairs(functions) do add_lane(start .. func .. '/', after, size) end
      end
    end
  end
end

-- The source with the first member; nil at the end.
local function first_source()
  local first
  for position = #sources, 1, -1 do
    local source = sources[position]
    if not source.order then
      table.remove(sources, position)
    elseif not first or source.order < first.order then
      first = source
    end
  end
  return first
end

-- The lane with the next member, at that member; nil at the end. Lanes are opened when their turn comes.
local function next_lane(wanted, after, limit)
  while true do
    local source = first_source()
    if not source or not (source.func or source.lane) then return source end
    local queue, lane = source.queue, source.lane
    if lane then
      source.order = nil
    else
      queue = string.sub(source.member, #source.prefix + ORDER_SIZE + 2)
      lane = queue .. '/' .. source.func .. '/'
      read_next(source)
    end
    local is_wanted = wanted[4] == 1 or string.sub(queue, 1, 1) == '0'
    if is_wanted and not has(wanted[2], string.sub(queue, 2)) then
      local is_only = #sources == 1 and not source.order
      add_lane(lane, after, is_only and limit or FIRST_PAGE)
    end
  end
end

-- Append up to `limit` next members to `found`, with ids and lanes; fewer at the end.
local function read_candidates(wanted, after, limit, found, found_ids, found_lanes)
  local source = next_lane(wanted, after, limit)
  while source and #found < limit do
    local position, prefix = #found + 1, source.prefix
    found[position], found_lanes[position] = source.member, prefix
    found_ids[position] = string.sub(source.member, #prefix + ORDER_SIZE + 2)
    read_next(source)
    if not source.order or #sources > 1 then source = next_lane(wanted, after, limit) end
  end
end

-- When a task may become claimable by time alone, as a stamp; '' when none will.
local function next_event()
  local first = redis.call('ZRANGEBYLEX', KEYS.delayed, '-', '+', 'LIMIT', 0, 1)[1]
  local gate = redis.call(
    'ZRANGEBYLEX', KEYS.document_dues, '[gate/' .. now_stamp .. '0', '(gate0', 'LIMIT', 0, 1
  )[1]
  local due = first and string.match(first, '^%d+') or ''
  local opens = gate and string.match(gate, '^gate/(%d+)') or ''
  if opens == '' or (due ~= '' and due < opens) then return due end
  return opens
end

-- In the same step as the search: a task that arrives from now on finds this worker waiting.
local function wait_for_more(channel, interest)
  if channel ~= '' then redis.call('HSET', KEYS.idle, channel, interest) end
  return next_event()
end
