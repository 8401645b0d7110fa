"""What callers and operators read and change, over any storage; queues, the command line and the
dashboard share it.

Plain data and plain functions, without any layout:

- `handle`: an enqueued task: its status, result, progress, and cancelling it.
- `health`: stalled workers, stuck tasks, open breakers, functions that no worker has.
- `limits`: running limits and rate limits, with the tasks that hold them.
- `overview`: counts, rates, latencies, queues, workers and failures.
- `background_count`: counts a large storage in the background.
- `run_history`: how runs ended over a time range, by function, queue and worker.
- `search_query`: a search for tasks as one line of text.
- `task_match`: whether a task is what a search describes.
- `find_tasks`: tasks by search, one page at a time.
- `failed_tasks`: tasks by error or worker.
- `waiting_reasons`: why the tasks of a queue wait, counted.
- `newest`: the newest tasks and dead letters.
- `task_detail`: everything known about one task.
- `task_changes`: another priority, queue or eta of one waiting task.
- `check`: what is stored that the code cannot run, by function and reason.
- `call_check`: whether the code can make one stored call.
- `explain`: why a task does not run, or how it ended.
- `reasons`, `flow_reasons`: the reasons that it gives, and those of tasks in workflows.
- `event_tail`: what happens in a fleet, as it happens.
- `start_flow`: starts flows and sends events.
- `flow_handle`: a flow that was started: its status, nodes, results, cancel and retry.
- `flow_view`: flows, their nodes and the open events, as operators see them.
- `output_stream`: follows the output of a task.
- `output_view`: the output of a task as text.
- `dead_groups`: dead letters grouped by error.
- `bulk_actions`: retry, cancel, change, delete and purge many tasks, in steps.
- `bulk_selection`: the tasks and dead letters that a bulk change is for.
- `doctor`: what a storage guarantees, and how its server is configured.
- `redaction`: hides secrets in arguments.
- `formatting`: durations, instants and counts as text.
"""
