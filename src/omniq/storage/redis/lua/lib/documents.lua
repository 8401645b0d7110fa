-- Documents: `documents` has `<kind>/<key>` → `<due>/<data>`, where `due` is a stamp or nothing;
-- `document_keys` their names in order; `document_dues` `<kind>/<due>/<key>` of those with a due time.
--
-- A change is { name, check, before, is stored, data, due }; check: 0 nothing, 1 there must be none,
-- 2 the data must be `before`, 3 the change is left out if the data is not `before`.
local stored_documents = {} -- name → its value as of the changes made so far; false when there is none

local function read_documents(changes)
  local names = {}
  for position, change in ipairs(changes) do names[position] = change[1] end
  for position, value in ipairs(get_all(KEYS.documents, names)) do stored_documents[names[position]] = value end
end

-- Due (or '') and data.
local function split_document(value)
  -- Most have no due time.
  if string.sub(value, 1, 1) == '/' then return '', string.sub(value, 2) end
  local due, start = string.match(value, '^(%d*)/()')
  if not due then return '', value end
  return due, string.sub(value, start)
end

local function has_data(name, data)
  local value = stored_documents[name]
  if not value then return false end
  local _, known = split_document(value)
  return known == data
end

local function is_unchanged(change)
  if change[2] == 1 then return not stored_documents[change[1]] end
  return change[2] ~= 2 or has_data(change[1], change[3])
end

local function due_member(name, due)
  local slash = string.find(name, '/', 1, true)
  return string.sub(name, 1, slash) .. due .. string.sub(name, slash)
end

local function apply_document(change)
  local name, check, before, is_stored, data, due = unpack(change)
  local known = stored_documents[name]
  if check == 3 and not has_data(name, before) then return end
  local known_due = known and split_document(known) or ''
  if known_due ~= '' then remove(KEYS.document_dues, due_member(name, known_due)) end
  if is_stored == 1 then
    stored_documents[name] = due .. '/' .. data
    put(KEYS.documents, name, stored_documents[name])
    if not known then add(KEYS.document_keys, name) end
    if due ~= '' then add(KEYS.document_dues, due_member(name, due)) end
  elseif known then
    stored_documents[name] = false
    drop(KEYS.documents, name)
    remove(KEYS.document_keys, name)
  end
end

-- The queues from which nothing is claimed, in order.
local function paused_queues()
  local found = redis.call('ZRANGEBYLEX', KEYS.document_keys, '[paused_queue/', '(paused_queue0')
  for position, name in ipairs(found) do found[position] = string.sub(name, #'paused_queue/' + 1) end
  return found
end
