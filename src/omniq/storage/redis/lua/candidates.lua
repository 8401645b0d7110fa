-- Reads the first waiting rows that a claim may take.
-- uses: request writes wakeups places heads lanes task_sets rows candidates first_rows
-- request   3 due by, 4 wanted (see lib/candidates), 5 the order behind which to begin or '', 6 how many,
--           7 channel of the worker or '', 8 its interest (see lib/wakeups)
-- returns   now, whether to call again, the next event ('' if there are more rows), and the rows
local due_by = request[3]
if not move_due(due_by) then return { now_text, 1, '', {} } end
local rows, is_end = first_rows(due_by, request[4], request[5], request[6])
return { now_text, 0, is_end and wait_for_more(request[7], request[8]) or '', rows }
