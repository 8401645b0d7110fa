"""What a task is to its author: the decorator, its options, and what a running task can do.

- `functions`: `@task`, paths of functions, and which functions a worker may run
- `function_lookup`: the function at a path, and the marked functions of loaded modules
- `passed_functions`: what this process has passed to a queue
- `options`: the table of options, and their checks
- `durations`: seconds and `timedelta` arguments, checked and converted to seconds
- `import_guard`: refuses to enqueue while a module is imported for its tasks
- `task_builder`: from a call to the `Task` that is stored
- `versions`: the versions of a function's arguments
- `declared_schedules`: `Cron` and `Interval`
- `batch_decorator`, `batches`: `@batched`, and how a worker calls such a function
- `flow`, `flow_records`: `Flow`, and the records that a flow stores beside its tasks
- `results`: `Results`, very many results as one argument
- `context`: `TaskContext`, what a running task can use
- `steps`: the checkpoint of a run: finished steps, cursors, sleeps
- `checkpoint`: `ctx.checkpoint` and `ctx.cursor`
- `transaction`: `ctx.transaction()`
- `control`: `Retry`, `Snooze` and `Discard`
- `children`: `ctx.call`, `map`, `spawn`, `wait` and `wait_for`
- `task_enqueuer`, `enqueued_ids`: `ctx.enqueue`, and the ids that its tasks get
- `task_output`: what `ctx.log` and `ctx.stream` store
- `error_rules`: whether a retry may help after an error
- `signature`: how a worker calls a function
- `arguments`: which arguments a function accepts, and their types
- `annotations`, `converters`, `record_converters`: from types of annotations to plain data and back
- `resources`: `Resource`, parameters that a worker fills in
- `secret_parameters`: which arguments are hidden
"""
