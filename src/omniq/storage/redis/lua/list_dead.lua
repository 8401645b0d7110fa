-- Reads dead letters in the order of their ids.
-- uses: request
-- keys: dead dead_ids
-- request   3 the id before the first, 4 how many
-- returns   the letters; fewer than the limit at the end
local from = request[3] == '' and '-' or '(' .. request[3]
local page = redis.call('ZRANGEBYLEX', dead_ids, from, '+', 'LIMIT', 0, request[4])
if #page == 0 then return {} end
return redis.call('HMGET', dead, unpack(page))
