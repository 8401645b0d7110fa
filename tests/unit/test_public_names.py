"""What users may import is exactly this."""

from __future__ import annotations

import subprocess
import sys

import omniq
from omniq import errors

# Names of the public face, in the order of the documentation.
FACE = [
    "TaskQueue",
    "AsyncTaskQueue",
    "TaskHandle",
    "AsyncTaskHandle",
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
    "ErrorRules",
    "DeadLetter",
    "QueueStats",
    "WorkerInfo",
    "Schedule",
    "BreakerRule",
    "CircuitBreaker",
    "BreakerState",
    "BreakerInfo",
    "Health",
    "StuckTask",
    "Attempt",
    "ExponentialBackoff",
    "LinearBackoff",
    "AsyncWorkerPool",
    "WorkerPool",
    "Worker",
    "PoolStats",
    "TaskContext",
    "current_task",
    "Retry",
    "Snooze",
    "Discard",
]


def test_every_public_name_is_there_and_no_other() -> None:
    of_errors = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OmniqError)
    ]

    assert sorted(omniq.__all__) == sorted(FACE + of_errors)
    assert all(hasattr(omniq, name) for name in omniq.__all__)


def test_importing_omniq_loads_no_driver_and_no_web_or_command_library() -> None:
    script = "import omniq, sys; print(' '.join(sys.modules))"
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
            "redis",
            "cloudpickle",
            "uvloop",
        ),
        *("typer", "click", "rich", "starlette", "uvicorn", "jinja2", "pytest"),
        *("django", "fastapi", "flask", "opentelemetry", "prometheus_client"),
        # Of the standard library, and slow to import all the same.
        *("email", "http"),
    }
    assert heavy.isdisjoint(loaded)
