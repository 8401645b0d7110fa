"""What a task is to its author: the decorator, its options, and what a running task can do.

- `functions`: `@task`, and the conversion between functions and their paths
- `options`: the table of options, and their checks
- `task_builder`: from a call to the `Task` that is stored
- `handle`: handles of enqueued tasks
- `context`: `TaskContext`, what a running task can use
- `steps`: the checkpoint of a run: finished steps, cursors, sleeps
- `checkpoint`: `ctx.checkpoint` and `ctx.cursor`
- `transaction`: `ctx.transaction()`
- `control`: `Retry`, `Snooze` and `Discard`
- `error_rules`: whether a retry may help after an error
- `signature`: how a worker calls a function
- `secret_parameters`: which arguments are hidden
"""
