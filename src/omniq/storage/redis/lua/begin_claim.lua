-- What a claim by the rules reads first, in one call.
-- uses: request writes wakeups places heads lanes task_sets rows held documents lease candidates first_rows
-- request   3 owner, 4 how many gates that are due, 5 names of other gates, 6 the claim: { limit, due by or
--           '', queues or 0, runnable (see lib/candidates), channel or '', interest }; 7 the epoch and 8 the
--           beat of the owner's lease, 9 how many of its calls have claimed, as the owner knows them
-- returns   'lost' when the owner has no such lease; else now; the paused queues; name and value of each gate
--           that is due; the suspects that the owner holds; whether the first rows could not be read, because
--           too many come due; the next event; the first rows; name and value ('' if there is none) of the
--           other gates and of those of the rows
local owner, names = request[3], request[5]
local limit, due_by, queues, runnable, channel, interest = unpack(request[6])
if not has_lease(owner, request[7], request[8], request[9]) then return 'lost' end
if due_by == '' then due_by = now_stamp end

local function with_values(found)
  local answer = {}
  for position, value in ipairs(get_all(KEYS.documents, found)) do
    answer[2 * position - 1], answer[2 * position] = found[position], value or ''
  end
  return answer
end

local gates = redis.call('ZRANGEBYLEX', KEYS.document_dues, '[gate/', '(gate/' .. now_stamp .. '0', 'LIMIT', 0, request[4])
for position, member in ipairs(gates) do gates[position] = string.gsub(member, '/%d+', '', 1) end
local suspects, owner_ids = {}, held_ids(owner, true)
append_rows(suspects, owner_ids, get_all(KEYS.places, owner_ids), false)

local is_partial, event, paused, rows = 1, '', paused_queues(), {}
if move_due(due_by) then
  local wanted, is_end = { queues, paused, runnable, #suspects == 0 and 1 or 0 }, false
  rows, is_end = first_rows(due_by, wanted, '', limit)
  is_partial, event = 0, is_end and wait_for_more(channel, interest) or ''
end

-- The gates of the rows. Rows that were enqueued together have the same state.
local is_named, last_state = {}, nil
for _, name in ipairs(names) do is_named[name] = true end
for position = 1, #rows, 4 do
  local state = rows[position + 3]
  if string.sub(rows[position + 1], GATED, GATED) == '1' then
    if state == '' then
      local start, state_start = without_body(rows[position + 2])
      state = string.sub(start, state_start)
    end
    local is_read, fields = true, {}
    if state ~= last_state then is_read, fields = pcall(cmsgpack.unpack, state) end
    last_state = state
    for _, gate in ipairs(is_read and fields.gates or {}) do
      local name = 'gate/' .. gate.key
      if not is_named[name] then
        is_named[name] = true
        names[#names + 1] = name
      end
    end
  end
end
return { now_text, paused, with_values(gates), suspects, is_partial, event, rows, with_values(names) }
