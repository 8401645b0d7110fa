"""omniq: a task queue for Python; one engine over many stores."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from omniq.context import TaskContext, current_task
from omniq.errors import (
    CircuitOpen,
    ClaimError,
    DuplicateTask,
    ForbiddenFunction,
    FunctionNotFound,
    InvalidTask,
    LeaseLost,
    OmniqError,
    PoolStopped,
    QueueFull,
    ResultError,
    ResultTimeout,
    SerializationError,
    SettingsError,
    ShutdownTimeout,
    StaleClaim,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from omniq.functions import task
from omniq.models import (
    BreakerRule,
    DeadLetter,
    ErrorCategory,
    PartialError,
    PermanentError,
    QueueStats,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
    TransientError,
    WorkerInfo,
)
from omniq.retry import ExponentialBackoff, LinearBackoff
from omniq.settings import Settings
from omniq.signals import Discard, Retry, Snooze

if TYPE_CHECKING:
    from omniq.blocking import TaskHandle, TaskQueue
    from omniq.pool.tally import PoolStats
    from omniq.queue import AsyncTaskHandle, AsyncTaskQueue
    from omniq.service.supervisor import Worker
    from omniq.worker import AsyncWorkerPool, WorkerPool
else:
    # Imported when first asked for: a process that only runs tasks needs neither queues nor
    # pools, and starts in half the time without them.
    _LATER = {
        "AsyncTaskHandle": "omniq.queue",
        "AsyncTaskQueue": "omniq.queue",
        "AsyncWorkerPool": "omniq.worker",
        "PoolStats": "omniq.pool.tally",
        "TaskHandle": "omniq.blocking",
        "TaskQueue": "omniq.blocking",
        "Worker": "omniq.service.supervisor",
        "WorkerPool": "omniq.worker",
    }

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module 'omniq' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATER[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *_LATER})


__all__ = [
    "AsyncTaskHandle",
    "AsyncTaskQueue",
    "AsyncWorkerPool",
    "BreakerRule",
    "CircuitOpen",
    "ClaimError",
    "DeadLetter",
    "Discard",
    "DuplicateTask",
    "ErrorCategory",
    "ExponentialBackoff",
    "ForbiddenFunction",
    "FunctionNotFound",
    "InvalidTask",
    "LeaseLost",
    "LinearBackoff",
    "OmniqError",
    "PartialError",
    "PermanentError",
    "PoolStats",
    "PoolStopped",
    "QueueFull",
    "QueueStats",
    "ResultError",
    "ResultTimeout",
    "Retry",
    "SerializationError",
    "Settings",
    "SettingsError",
    "ShutdownTimeout",
    "Snooze",
    "StaleClaim",
    "StorageClosed",
    "StorageCorrupt",
    "StorageError",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskError",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TaskQueue",
    "TaskResult",
    "TaskStatus",
    "TransientError",
    "Worker",
    "WorkerInfo",
    "WorkerPool",
    "current_task",
    "task",
]
