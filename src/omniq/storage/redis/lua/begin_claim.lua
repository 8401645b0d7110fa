-- What every claim by the rules reads first, in one call.
-- uses: request writes wakeups places lanes task_sets rows held documents candidates
-- keys: leases
-- request   3 owner, 4 how many gates that are due
-- returns   'lost' when the owner has no lease; else now, the paused queues, key and value of each gate
--           that is due, and the suspects that the owner holds
local owner = request[3]
if not redis.call('ZSCORE', leases, owner) then return 'lost' end
local gates = redis.call(
  'ZRANGEBYLEX', document_dues, '[gate/', '(gate/' .. now_stamp .. '0', 'LIMIT', 0, request[4]
)
for position, member in ipairs(gates) do gates[position] = string.gsub(member, '/%d+', '', 1) end
local due = {}
for position, value in ipairs(get_all(documents, gates)) do
  due[2 * position - 1], due[2 * position] = gates[position], value or ''
end
local rows, owner_ids = {}, held_ids(owner, true)
append_rows(rows, owner_ids, get_all(places, owner_ids), false)
return { now_text, paused_queues(), due, rows }
