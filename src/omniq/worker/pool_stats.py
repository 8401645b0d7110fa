"""What a pool has done, in numbers."""

from __future__ import annotations

import msgspec


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a pool. `queued_tasks` is as of the last claim; times are milliseconds.

    `queue_high_water` is the most waiting tasks that the pool has known of since it was made.
    `completed_tasks` and `failed_tasks` are tasks that have ended, as the storage has recorded
    them; a run that failed and will be retried counts in `retried_runs`. `stale_outcomes` came
    too late: another worker had claimed the task.
    """

    workers_count: int
    active_workers: int
    queued_tasks: int
    completed_tasks: int
    failed_tasks: int
    average_exec_time: float
    retried_runs: int = 0
    leaked_threads: int = 0
    stale_outcomes: int = 0
    queue_high_water: int = 0
