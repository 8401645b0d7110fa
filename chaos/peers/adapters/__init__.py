"""How each queue is driven: its documented client, its documented worker, and nothing else.

An adapter is a module with three functions, run in the environment of its queue:

- `produce()` enqueues the tasks of `chaos.peers.workload.tasks()`, and calls `acknowledged(id)` for
  each one as soon as the queue has said yes;
- `work()` is one worker, with `CONCURRENCY` tasks at a time, until it is killed;
- `left()` gives the tasks that the store still knows: `held` where the queue will run them again by
  itself, `failed` where it has given up and keeps them for a person to look at.

`SETTINGS` are those of the profile, by the names that the queue's documentation uses.
"""
