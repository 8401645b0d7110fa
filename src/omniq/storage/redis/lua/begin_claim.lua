-- What every claim by the rules reads first, in one call.
-- uses: request writes rows held documents
-- request   3 owner, 4 how many gates that are due, 5 names of other documents
-- returns   'lost' when the owner has no lease; else now, the paused queues, key and value of each gate
--           that is due, the suspects that the owner holds, and the values of the other documents
local owner = request[3]
if not redis.call('ZSCORE', KEYS.leases, owner) then return 'lost' end
local gates = redis.call(
  'ZRANGEBYLEX', KEYS.document_dues, '[gate/', '(gate/' .. now_stamp .. '0', 'LIMIT', 0, request[4]
)
for position, member in ipairs(gates) do gates[position] = string.gsub(member, '/%d+', '', 1) end
local due = {}
for position, value in ipairs(get_all(KEYS.documents, gates)) do
  due[2 * position - 1], due[2 * position] = gates[position], value or ''
end
local rows, owner_ids = {}, held_ids(owner, true)
append_rows(rows, owner_ids, get_all(KEYS.places, owner_ids), false)
local others = get_all(KEYS.documents, request[5])
for position, value in ipairs(others) do others[position] = value or '' end
return { now_text, paused_queues(), due, rows, others }
