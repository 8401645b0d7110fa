-- What an owner holds.
-- uses: request held_rows
-- keys: places
-- request   3 owner
-- returns   id and place of each
local answer = {}
for _, id in ipairs(held_ids(request[3])) do
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGET', places, id) or ''
end
return answer
