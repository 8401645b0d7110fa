"""Runs one claimed task where its function belongs, and turns its end into an outcome.

- `execution`: finds the function, calls it, and makes one `Outcome` of what happened.
- `batch_call`: one call for the runs of several tasks.
- `flow_actions`: what a node of a flow needs besides the call of its function.
- `thread_executor`: the threads for sync functions.
- `process_executor`: the child processes for functions with `executor="process"`.
- `process_protocol`: the messages between a worker and its child processes.
- `process_child`: the program of a child process.
- `process_enqueue`, `process_flows`: how a task in a child process enqueues others, and waits for them.
- `resource_calls`: calls functions with resources.
- `child_limits`: how much memory, and how many processes and files, a child process may use.
- `child_lifetime`: the lifespan and the resources of a child process.
- `die_with_parent`: ends a child process when its parent has ended.
"""
