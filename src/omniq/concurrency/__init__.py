"""Event loops, threads and processes: what the other packages share.

- `portal`: the bridge from blocking code to an event loop in another thread
- `blocking`: blocking classes made from async ones
- `callers_lock`: lets a thread run a blocking call of a storage without an event loop
- `event_loop`: whether one runs here, and one that the code of tasks cannot end
- `coroutines`: drives a coroutine that never suspends, or one inside another asyncio task
- `futures`: completes futures that may be done already
- `backoff`: growing pauses between attempts
- `running_task`: which task runs here: what the lines of its code are marked with
- `process_id`: the id of this process, and a base of what cannot leave it
"""
