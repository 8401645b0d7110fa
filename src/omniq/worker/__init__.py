"""Runs tasks: worker pools, executors, and the processes of `omniq worker`.

- `pool`: `AsyncWorkerPool` and `WorkerPool`, the public pools.
- `pool_runtime`: one run of a pool, from start to stop.
- `pool_parts`: how the parts below are made, connected and opened.
- `pool_config`: the options of a pool.
- `open_parts`: what a pool has opened and closes again, and its side loops.
- `pool_events`: what the parts report to the pool.
- `claim_loop`: records outcomes and claims tasks, with back-off.
- `demand`: when to claim and how many; a state machine.
- `drain`: runs what is there until nothing is left.
- `refused_outcomes`: finds and holds the outcomes that the store refuses.
- `unknown_functions`: what happens to tasks that no function here can run.
- `waiting_counter`: counts the waiting tasks, for statistics.
- `running_tasks`: the tasks that run now, with their timeouts.
- `batches`: which claimed tasks share a call, and when it is made.
- `recycling`: when a process is to be replaced by a new one.
- `interruption`: how a task ends whose run the worker has to interrupt.
- `heartbeat`: renews the lease from a separate thread.
- `lease_watch`: decides when another worker has lost its lease.
- `loop_watchdog`: detects a blocked event loop.
- `schedule_loop`: fires schedules.
- `maintenance`: recovers tasks of dead workers, purges old records, stores progress.
- `problems`: reports what fails in a worker, and an outage of the storage once.
- `fleet_alerts`: reports stalled workers, stuck tasks and breakers.
- `failure_hooks`: calls `on_success`, `on_failure` and `on_dead`.
- `dead_hooks`: which `on_dead` hooks the worker calls, also of lost workers.
- `worker_requests`: stops and answers as operators ask it to.
- `lifespan`: what a worker process opens before its first task, and closes after its last.
- `resources`: makes and closes what parameters with a `Resource` receive.
- `middleware`: functions of the application around each run.
- `task_services`: what running tasks can ask of the worker.
- `task_handles`: handles of the tasks that a running task has enqueued.
- `flow_access`: the records of a workflow, for running tasks.
- `output_writer`: stores the output of running tasks in batches.
- `run_recorder`: counts runs by the minute. `code_version`: the version of the application's code.
- `stats_recorder` and `pool_stats`: the numbers of a pool, and the events of its tasks.
- `import_path`: where the processes of a worker import modules from.
- `storage_session`: opens and closes the storage of a pool.
- `executors/`: runs one task on the event loop, in a thread or in a child process.
- `process/`: the processes of `omniq worker`: signals, supervision, exit codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniq.worker.pool import AsyncWorkerPool as AsyncWorkerPool
    from omniq.worker.pool import WorkerPool as WorkerPool
else:
    # Imported on first use: a child process that only runs tasks needs no pool.
    def __getattr__(name):
        if name not in ("AsyncWorkerPool", "WorkerPool"):
            raise AttributeError(f"module 'omniq.worker' has no attribute {name!r}")
        from omniq.worker import pool

        return getattr(pool, name)
