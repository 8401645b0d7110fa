-- Reads documents in the order of their keys, or of their due times.
-- uses: request writes rows
-- request   3 kind, 4 and 5 the range of names, or with 6 (due by, or '') of due times and names,
--           7 how many
-- returns   now, then name and value of each
local kind, due_by, limit = request[3] .. '/', request[6], request[7]
local names
if due_by ~= '' then
  names = redis.call('ZRANGEBYLEX', KEYS.document_dues, request[4], '(' .. kind .. due_by .. '0', 'LIMIT', 0, limit)
  for position, member in ipairs(names) do names[position] = string.gsub(member, '/%d+', '', 1) end
else
  names = redis.call('ZRANGEBYLEX', KEYS.document_keys, request[4], request[5], 'LIMIT', 0, limit)
end
local answer = { now_text }
for position, value in ipairs(get_all(KEYS.documents, names)) do
  if value then
    answer[#answer + 1] = names[position]
    answer[#answer + 1] = kind == 'gate/' and value or fitting(value)
  end
end
return answer
