"""Users can import exactly these names from `omniq`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import omniq
from omniq import errors

# In the order of the documentation; every error comes in addition.
PUBLIC = [
    "TaskQueue",
    "AsyncTaskQueue",
    "TaskHandle",
    "AsyncTaskHandle",
    "Flow",
    "FlowHandle",
    "Args",
    "AsyncFlowHandle",
    "TaskWorkflow",
    "CheckProblem",
    "CheckReport",
    "ChildrenFailed",
    "WaitTimeout",
    "task",
    "Settings",
    "Secret",
    "Task",
    "TaskResult",
    "TaskStatus",
    "TaskError",
    "ErrorCategory",
    "PermanentError",
    "TransientError",
    "PartialError",
    "Pause",
    "ErrorRules",
    "DeadLetter",
    "QueueStats",
    "WorkerInfo",
    "Pong",
    "QueueInfo",
    "LimitInfo",
    "FairShare",
    "Limit",
    "Runnable",
    "Schedule",
    "BreakerRule",
    "CircuitBreaker",
    "BreakerState",
    "BulkReport",
    "BreakerInfo",
    "Health",
    "StuckTask",
    "UnmarkedFunctionWarning",
    "UnrunnableFunction",
    "Attempt",
    "Progress",
    "OutputChunk",
    "Serializer",
    "MsgspecSerializer",
    "CloudpickleSerializer",
    "BaseStorage",
    "Capabilities",
    "ExponentialBackoff",
    "LinearBackoff",
    "AsyncWorkerPool",
    "WorkerPool",
    "Worker",
    "PoolStats",
    "TaskContext",
    "Cron",
    "Interval",
    "Resource",
    "INJECTED",
    "batched",
    "current_task",
    "Results",
    "Retry",
    "Snooze",
    "Discard",
    "__version__",
]


def test_omniq_exports_these_names_and_no_others() -> None:
    of_errors = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OmniqError)
    ]

    assert sorted(omniq.__all__) == sorted(PUBLIC + of_errors)
    assert all(hasattr(omniq, name) for name in omniq.__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    assert omniq.__version__ == version("omniq")


def test_importing_omniq_loads_no_driver_and_no_web_or_command_library() -> None:
    # Not what the interpreter itself was started with: a coverage run loads sqlite3.
    script = (
        "import sys; before = set(sys.modules); import omniq; "
        "print(' '.join(sys.modules.keys() - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()

    heavy = {
        *(
            "sqlite3",
            "asyncpg",
            "psycopg",
            "sqlalchemy",
            "hiredis",
            "obstore",
            "redis",
            "cloudpickle",
            "uvloop",
        ),
        *("typer", "click", "rich", "starlette", "uvicorn", "jinja2", "pytest"),
        *("django", "fastapi", "flask", "opentelemetry", "prometheus_client"),
        # In the standard library, but slow to import.
        *("email", "http"),
    }
    assert heavy.isdisjoint(loaded)
