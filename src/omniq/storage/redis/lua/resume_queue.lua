-- Allows claims from a paused queue again.
-- uses: request wakeups
-- keys: paused_queues
-- request   3 queue
redis.call('SREM', paused_queues, request[3])
add_claimable(request[3], 1)
send_wakeups()
return 'OK'
