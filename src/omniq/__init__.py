"""omniq: a task queue for Python; one engine over many stores."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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
from omniq.tasks.context import TaskContext, current_task
from omniq.tasks.control import Discard, Retry, Snooze
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.functions import task
from omniq.tasks.secret_parameters import Secret

if TYPE_CHECKING:
    from omniq.circuit_breaker import BreakerState, CircuitBreaker
    from omniq.queue.async_queue import AsyncTaskQueue
    from omniq.queue.blocking_queue import TaskQueue
    from omniq.storage.health import BreakerInfo, Health, StuckTask
    from omniq.tasks.handle import AsyncTaskHandle, TaskHandle
    from omniq.worker import AsyncWorkerPool, WorkerPool
    from omniq.worker.pool_stats import PoolStats
    from omniq.worker.process.supervisor import Worker
else:
    # Imported when first asked for: a process that only runs tasks needs neither queues nor
    # pools, and starts in half the time without them.
    _LATER = {
        "AsyncTaskHandle": "omniq.tasks.handle",
        "AsyncTaskQueue": "omniq.queue.async_queue",
        "AsyncWorkerPool": "omniq.worker",
        "BreakerInfo": "omniq.storage.health",
        "BreakerState": "omniq.circuit_breaker",
        "CircuitBreaker": "omniq.circuit_breaker",
        "Health": "omniq.storage.health",
        "PoolStats": "omniq.worker.pool_stats",
        "StuckTask": "omniq.storage.health",
        "TaskHandle": "omniq.tasks.handle",
        "TaskQueue": "omniq.queue.blocking_queue",
        "Worker": "omniq.worker.process.supervisor",
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
