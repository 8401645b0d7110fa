-- Reads the rows that owners hold.
-- uses: request writes rows held
-- request   3 owners, 4 whether only suspects
-- returns   now, then id, place, record without the body, and state of each
local answer = { now_text }
for _, owner in ipairs(request[3]) do
  local owner_ids = held_ids(owner, request[4] == 1)
  append_rows(answer, owner_ids, get_all(KEYS.places, owner_ids), false)
end
return answer
