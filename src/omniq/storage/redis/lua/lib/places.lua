-- The place of a task: one string that says where the task is and in which state. `encoding.py` defines
-- it, and the constants of its parts (KIND, ORDER_FIRST, ORDER_LAST, …), counted from 1.
--
--   <parts of fixed size><token>/<queue>/<function>/<expires>/<tail>
--
--   kind   w waits, p parked, h held, f finished
--   tail   p: the gate that blocks it; h: owner/started/claim; f: finished/expires

-- Token, queue, function, `expires`, tail.
local function split_place(place)
  return string.match(place, '^(%d+)/([^/]*)/([^/]*)/([^/]*)/(.*)$', FIXED_LAST + 1)
end

local function is_finished(place)
  return string.sub(place, KIND, KIND) == 'f'
end

-- Whether the place is that of a finished task whose `result_ttl` has passed.
local function is_expired(place)
  if not is_finished(place) then return false end
  -- nil if the place is damaged. Without `^`, a pattern is tried from each of the 90 digits that a place begins with.
  local expires_at = tonumber(string.match(place, '^.*/(%d+)$', FIXED_LAST + 1) or '')
  return expires_at and expires_at <= now
end
