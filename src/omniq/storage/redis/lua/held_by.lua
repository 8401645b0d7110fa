-- Reads which tasks an owner holds.
-- uses: request held
-- request   3 owner
-- returns   id and place of each
local answer = {}
append_places(answer, request[3])
return answer
