"""omniq: a task queue for Python; one engine over many stores."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from omniq.classify import ErrorRules
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
    ScheduleNotFound,
    SerializationError,
    SettingsError,
    ShutdownTimeout,
    StaleClaim,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    StorageRefused,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from omniq.functions import task
from omniq.marking import Secret
from omniq.models import (
    Attempt,
    BreakerRule,
    DeadLetter,
    ErrorCategory,
    PartialError,
    PermanentError,
    QueueStats,
    Schedule,
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
    from omniq.breaker import BreakerState, CircuitBreaker
    from omniq.health import BreakerInfo, Health, StuckTask
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
        "BreakerInfo": "omniq.health",
        "BreakerState": "omniq.breaker",
        "CircuitBreaker": "omniq.breaker",
        "Health": "omniq.health",
        "PoolStats": "omniq.pool.tally",
        "StuckTask": "omniq.health",
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
    "Attempt",
    "BreakerInfo",
    "BreakerRule",
    "BreakerState",
    "CircuitBreaker",
    "CircuitOpen",
    "ClaimError",
    "DeadLetter",
    "Discard",
    "DuplicateTask",
    "ErrorCategory",
    "ErrorRules",
    "ExponentialBackoff",
    "ForbiddenFunction",
    "FunctionNotFound",
    "Health",
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
    "Schedule",
    "ScheduleNotFound",
    "Secret",
    "SerializationError",
    "Settings",
    "SettingsError",
    "ShutdownTimeout",
    "Snooze",
    "StaleClaim",
    "StorageClosed",
    "StorageCorrupt",
    "StorageError",
    "StorageRefused",
    "StuckTask",
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
