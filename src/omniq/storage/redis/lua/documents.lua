-- Reads documents that have a largest size: not the states of gates.
-- uses: request writes rows
-- request   3 their names
-- returns   the value of each, in order; nil where there is none
local found = get_all(KEYS.documents, request[3])
for position, value in ipairs(found) do found[position] = value and fitting(value) end
return found
