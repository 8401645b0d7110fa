"""omniq: a task queue for Python; one engine over many stores."""

from __future__ import annotations

from loguru import logger

from omniq.blocking import TaskHandle, TaskQueue
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

# A library does not talk unasked: `omniq.log.enable()` switches its log lines on.
logger.disable("omniq")

__all__ = [
    "AsyncTaskHandle",
    "AsyncTaskQueue",
    "BreakerRule",
    "CircuitOpen",
    "ClaimError",
    "DeadLetter",
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
    "PoolStopped",
    "QueueFull",
    "QueueStats",
    "ResultError",
    "ResultTimeout",
    "SerializationError",
    "Settings",
    "SettingsError",
    "ShutdownTimeout",
    "StaleClaim",
    "StorageClosed",
    "StorageCorrupt",
    "StorageError",
    "Task",
    "TaskCancelled",
    "TaskError",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TaskQueue",
    "TaskResult",
    "TaskStatus",
    "TransientError",
    "WorkerInfo",
    "task",
]
