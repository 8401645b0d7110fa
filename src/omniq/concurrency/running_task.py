"""Which task runs here: what the lines of its code are marked with.

`tasks.context` sets it, and `log` reads it: neither needs the other. It is a context variable: an asyncio task has it, a thread that omniq or
`asyncio.to_thread` starts for it, and the child process of a task.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class RunningTask(Protocol):
    """The facts of a running task that its log lines carry."""

    @property
    def task_id(self) -> str: ...

    @property
    def func_path(self) -> str: ...

    @property
    def attempt(self) -> int: ...


CURRENT: ContextVar[Any] = ContextVar("omniq_current_task")
"""The `TaskContext` of the task that runs here."""


def running_task() -> RunningTask | None:
    """The task that runs here; None outside of a task."""
    found: RunningTask | None = CURRENT.get(None)
    return found
