"""omniq: a task queue for Python; one engine over many stores."""

from __future__ import annotations

from loguru import logger

from omniq.blocking import TaskHandle, TaskQueue
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
from omniq.queue import AsyncTaskHandle, AsyncTaskQueue
from omniq.retry import ExponentialBackoff, LinearBackoff
from omniq.settings import Settings
from omniq.signals import Discard, Retry, Snooze
from omniq.worker import AsyncWorkerPool, PoolStats, WorkerPool

# A library does not talk unasked: `omniq.log.enable()` switches its log lines on.
logger.disable("omniq")

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
    "WorkerInfo",
    "WorkerPool",
    "current_task",
    "task",
]
