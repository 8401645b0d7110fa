"""Runs tasks: worker pools, executors, and the processes of `omniq worker`."""

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
