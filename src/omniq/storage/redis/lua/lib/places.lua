-- The place of a task: one string that says where the task is and in which state.
--
--   <kind><queue>/<order><flags><token>/<rest>
--
--   kind    r ready, s suspect, p parked, h held, f finished
--   order   54 digits that sort in the order of claims: priority (20, highest first), due (18),
--           sequence (16)
--   flags   status (p r t s f c), then 1 or 0 each: not visible before its due time, has conditions,
--           suspect, cancel requested, its last claim was ended by an outcome
--   token   of the last claim
--   rest    p: the gate that blocks it; h: owner/started/claim; f: finished/expires
--
-- `<queue>/<order><flags><token>` is called the core. A caller that changes a task names the place
-- from which the change starts: no two states of a task have the same place.

-- Positions after the slash behind the queue, counted from 1. `PlaceSlices` in encoding.py has the
-- same parts, counted from 0; a test compares the two.
local PRIORITY_LAST = 20
local DUE_FIRST, DUE_LAST = 21, 38
local ORDER_LAST = 54
local STATUS_AT = 55
local VISIBLE_FLAG, CONDITIONS_FLAG, SUSPECT_FLAG, CANCEL_FLAG = 56, 57, 58, 59
local TOKEN_FIRST = 61

local STAMP_SIZE = 18 -- digits of a due time, which is also how a member of `delayed` begins

local PLACE = '^(%a)(([^/]*)/(%d+)(%a%d%d%d%d%d)(%d+))/(.*)$' -- kind, core, queue, order, flags, token, rest
local CLAIM = '^%a[^/]*/%d+%a%d%d%d%d%d(%d+)/([^/]*)' -- token; of a held task also its owner
local HELD_CLAIM_ID = '^h[^/]*/[^/]*/[^/]*/%d+/(.*)$'

-- One of the flags: `position` is one of the constants above.
local function flag(flags, position)
  return string.sub(flags, position - ORDER_LAST, position - ORDER_LAST)
end

local function kind_of(place)
  return string.sub(place, 1, 1)
end

local function is_finished(place)
  return kind_of(place) == 'f'
end

-- Whether the place is that of a finished task whose `result_ttl` has passed.
local function is_expired(place)
  return is_finished(place) and tonumber(string.match(place, '(%d+)$')) <= now
end
