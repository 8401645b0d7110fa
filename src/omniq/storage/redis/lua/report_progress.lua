-- Stores reports of running tasks; a report whose claim is not the current one is dropped.
-- uses: request places current_claim
-- keys: progress
-- request   3 owner, 4 reports: { id, token, report }
for _, report in ipairs(request[4]) do
  if is_current_claim(report[1], request[3], report[2]) then
    redis.call('HSET', progress, report[1], report[3])
  end
end
return 'OK'
