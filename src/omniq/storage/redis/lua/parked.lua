-- Reads the first parked rows of each gate, queue and function, suspects and others apart.
-- uses: request writes rows parked
-- request   3 names of gates, 4 how many of each
-- returns   now, then the rows
local answer, members, ids = { now_text }, {}, {}
for _, gate in ipairs(request[3]) do add_parked(members, ids, gate, request[4]) end
append_rows(answer, ids, get_all(KEYS.places, ids), true)
return answer
