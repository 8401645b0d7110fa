-- Reads rows for replies: id, place, record and state of each. A record is
-- `<created>/<size of the state>/<state as enqueued><body>`; a state that has changed is in `states`.

-- A record without the body, and where its state begins.
local function without_body(record)
  local size, start = string.match(record, '^%d+/(%d+)/()')
  if not size then return record, #record + 1 end
  return string.sub(record, 1, start + size - 1), start
end

-- A value, or nothing of one that is too large to be sent: see `largest_value`.
local function fitting(value)
  if #value > LARGEST_VALUE then return '' end
  return value
end

-- Append the rows of these ids; one without a record is left out. `records`: if they have been read.
local function append_rows(answer, row_ids, row_places, has_bodies, records)
  local row_states = get_all(KEYS.states, row_ids)
  records = records or get_all(KEYS.tasks, row_ids)
  for position, id in ipairs(row_ids) do
    local record, size = records[position], #answer
    if record and row_places[position] then
      answer[size + 1], answer[size + 2] = id, row_places[position]
      local state = row_states[position] or ''
      if not has_bodies or #record + #state > LARGEST_VALUE then record = without_body(record) end
      answer[size + 3] = record
      answer[size + 4] = fitting(state)
    end
  end
end
