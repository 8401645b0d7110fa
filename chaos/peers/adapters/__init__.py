"""How each queue is driven: its documented client, its documented worker, and nothing else.

An adapter is a module with three functions, run in the environment of its queue:

- `produce()` enqueues the tasks of `chaos.peers.workload.tasks()`, and calls `acknowledged(id)` for
  each one as soon as the queue has accepted it;
- `work()` is one worker, with `CONCURRENCY` tasks at a time, until it is killed;
- `left()` returns the tasks that the store still has: `held` if the queue will run them again
  automatically, `failed` if it has given up and stores them for inspection.

`SETTINGS` are the settings of the profile, with the names of the queue's documentation.
"""
