-- Lets a queue be claimed from again.
-- uses: request waking
-- keys: paused
-- request   3 queue
redis.call('SREM', paused, request[3])
wake(request[3], 1)
send_wakes()
return 'OK'
