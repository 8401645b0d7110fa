"""omniq: a task queue for Python; one engine over many storages.

The public names are listed in `__all__`. The modules, from the values at the bottom to the commands
at the top:

- `errors`: every exception that omniq raises, as one tree
- `clock`: the only source of the current time, of waiting, and of new ids
- `models`: `Task`, `TaskResult`, `Schedule` and the other values, and the checks of their fields
- `outcomes`: every way in which a run can end, as a closed set of values
- `retry`: whether a failed task runs again, and after which delay
- `cron`: the times that a cron expression or an interval names
- `gate_rules`: running limits, rate limits and breakers that the whole fleet shares
- `circuit_breaker`: `CircuitBreaker`, for calls in plain code
- `serialization`: values to bytes and back; `signing`: signed and encrypted records
- `events`: what happened, as values; `metrics` counts them
- `failpoints`: named places in the code where a test can crash or stop the process
- `_deprecation`, `_version`: small private parts

The packages:

- `settings`: `Settings` from arguments, environment and TOML files
- `concurrency`: event loops, threads and processes; `text`: masking, escaping, JSON
- `log`: events as lines of the log
- `tasks`: `@task`, its options, the context of a running task, steps and checkpoints
- `queue`: `TaskQueue`, `AsyncTaskQueue` and dead letters
- `scheduling`: `queue.schedules` and the due times of a schedule
- `storage`: the storage contract and one package for each backend
- `worker`: worker pools, executors, and the worker process that `omniq worker` runs
- `operations`: what the command line and the dashboard have in common
- `cli`: the command `omniq`
- `dashboard`: the web pages and their API
- `integrations`: ASGI, Django, FastAPI, Flask, OpenTelemetry, Prometheus
- `testing`: the storage contract as a test suite, a manual clock, faults, a simulated fleet
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from omniq._version import __version__
from omniq.errors import (
    CallTimeout,
    CircuitOpen,
    ClaimError,
    DuplicateTask,
    ForbiddenFunction,
    FunctionNotFound,
    InvalidTask,
    InvalidValue,
    KeyNeeded,
    LeaseLost,
    LifespanFailed,
    MiddlewareError,
    NotSealed,
    OmniqError,
    OutputTooLarge,
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
    StoreWentBack,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    TaskNotWaiting,
    UnguardedModule,
    UnmarkedFunctionWarning,
)
from omniq.models import (
    Attempt,
    BreakerRule,
    ChildrenFailed,
    DeadLetter,
    ErrorCategory,
    FairShare,
    Limit,
    PartialError,
    PermanentError,
    Pong,
    Progress,
    QueueStats,
    Runnable,
    Schedule,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
    TaskWorkflow,
    TransientError,
    WaitTimeout,
    WorkerInfo,
)
from omniq.retry import ExponentialBackoff, LinearBackoff
from omniq.settings import Settings
from omniq.tasks.batch_decorator import batched
from omniq.tasks.context import TaskContext, current_task
from omniq.tasks.control import Discard, Retry, Snooze
from omniq.tasks.declared_schedules import Cron, Interval
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.functions import task
from omniq.tasks.resources import INJECTED, Resource
from omniq.tasks.secret_parameters import Secret
from omniq.tasks.versions import Args

if TYPE_CHECKING:
    from omniq.circuit_breaker import BreakerState, CircuitBreaker
    from omniq.operations.bulk_actions import BulkReport
    from omniq.operations.check import CheckProblem, CheckReport
    from omniq.operations.flow_handle import AsyncFlowHandle, FlowHandle
    from omniq.operations.handle import AsyncTaskHandle, TaskHandle
    from omniq.operations.health import BreakerInfo, Health, StuckTask, UnrunnableFunction
    from omniq.operations.limits import LimitInfo
    from omniq.operations.overview import QueueInfo
    from omniq.queue.async_queue import AsyncTaskQueue
    from omniq.queue.blocking_queue import TaskQueue
    from omniq.serialization import CloudpickleSerializer, MsgspecSerializer, Serializer
    from omniq.storage.base import BaseStorage
    from omniq.storage.pauses import Pause
    from omniq.storage.types import Capabilities
    from omniq.tasks.flow import Flow
    from omniq.tasks.results import Results
    from omniq.tasks.task_output import OutputChunk
    from omniq.worker import AsyncWorkerPool, WorkerPool
    from omniq.worker.pool_stats import PoolStats
    from omniq.worker.process.supervisor import Worker
else:
    # Imported on first use: a process that only runs tasks needs neither queues nor pools, and
    # starts in half the time without them.
    _LAZY = {
        "AsyncFlowHandle": "omniq.operations.flow_handle",
        "AsyncTaskHandle": "omniq.operations.handle",
        "AsyncTaskQueue": "omniq.queue.async_queue",
        "AsyncWorkerPool": "omniq.worker",
        "BaseStorage": "omniq.storage.base",
        "BreakerInfo": "omniq.operations.health",
        "BreakerState": "omniq.circuit_breaker",
        "BulkReport": "omniq.operations.bulk_actions",
        "Capabilities": "omniq.storage.types",
        "CheckProblem": "omniq.operations.check",
        "CheckReport": "omniq.operations.check",
        "CircuitBreaker": "omniq.circuit_breaker",
        "CloudpickleSerializer": "omniq.serialization",
        "Flow": "omniq.tasks.flow",
        "Results": "omniq.tasks.results",
        "FlowHandle": "omniq.operations.flow_handle",
        "Health": "omniq.operations.health",
        "LimitInfo": "omniq.operations.limits",
        "MsgspecSerializer": "omniq.serialization",
        "OutputChunk": "omniq.tasks.task_output",
        "Pause": "omniq.storage.pauses",
        "PoolStats": "omniq.worker.pool_stats",
        "QueueInfo": "omniq.operations.overview",
        "Serializer": "omniq.serialization",
        "StuckTask": "omniq.operations.health",
        "TaskHandle": "omniq.operations.handle",
        "TaskQueue": "omniq.queue.blocking_queue",
        "UnrunnableFunction": "omniq.operations.health",
        "Worker": "omniq.worker.process.supervisor",
        "WorkerPool": "omniq.worker",
    }

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'omniq' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *_LAZY})


__all__ = [
    "INJECTED",
    "Args",
    "AsyncFlowHandle",
    "AsyncTaskHandle",
    "AsyncTaskQueue",
    "AsyncWorkerPool",
    "Attempt",
    "BaseStorage",
    "BreakerInfo",
    "BreakerRule",
    "BreakerState",
    "BulkReport",
    "CallTimeout",
    "Capabilities",
    "CheckProblem",
    "CheckReport",
    "ChildrenFailed",
    "CircuitBreaker",
    "CircuitOpen",
    "ClaimError",
    "CloudpickleSerializer",
    "Cron",
    "DeadLetter",
    "Discard",
    "DuplicateTask",
    "ErrorCategory",
    "ErrorRules",
    "ExponentialBackoff",
    "FairShare",
    "Flow",
    "FlowHandle",
    "ForbiddenFunction",
    "FunctionNotFound",
    "Health",
    "Interval",
    "InvalidTask",
    "InvalidValue",
    "KeyNeeded",
    "LeaseLost",
    "LifespanFailed",
    "Limit",
    "LimitInfo",
    "LinearBackoff",
    "MiddlewareError",
    "MsgspecSerializer",
    "NotSealed",
    "OmniqError",
    "OutputChunk",
    "OutputTooLarge",
    "PartialError",
    "Pause",
    "PermanentError",
    "Pong",
    "PoolStats",
    "PoolStopped",
    "Progress",
    "QueueFull",
    "QueueInfo",
    "QueueStats",
    "Resource",
    "ResultError",
    "ResultTimeout",
    "Results",
    "Retry",
    "Runnable",
    "Schedule",
    "ScheduleNotFound",
    "Secret",
    "SerializationError",
    "Serializer",
    "Settings",
    "SettingsError",
    "ShutdownTimeout",
    "Snooze",
    "StaleClaim",
    "StorageClosed",
    "StorageCorrupt",
    "StorageError",
    "StorageRefused",
    "StoreWentBack",
    "StuckTask",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskError",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TaskNotWaiting",
    "TaskQueue",
    "TaskResult",
    "TaskStatus",
    "TaskWorkflow",
    "TransientError",
    "UnguardedModule",
    "UnmarkedFunctionWarning",
    "UnrunnableFunction",
    "WaitTimeout",
    "Worker",
    "WorkerInfo",
    "WorkerPool",
    "__version__",
    "batched",
    "current_task",
    "task",
]
