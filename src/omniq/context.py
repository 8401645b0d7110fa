"""What a running task can know about itself, and say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any

from omniq.errors import InvalidTask, OmniqError
from omniq.models import Progress, Task

_MAX_MESSAGE = 1000

_current: ContextVar[TaskContext] = ContextVar("omniq_current_task")


class TaskContext:
    """The task as its own function sees it. Declare it as the first parameter to be given it.

    Safe to use from the thread that runs the function. `fencing_token` grows with every claim of
    the task: pass it on to systems that can refuse writers with an older one.
    """

    __slots__ = ("_report", "_task", "cancelled", "timeout")

    def __init__(
        self, task: Task, timeout: float | None, report: Callable[[Progress], None]
    ) -> None:
        self._task = task
        self._report = report
        self.timeout = timeout
        self.cancelled = False
        """Whether to stop: the task was cancelled, took too long, or lost its lease."""

    @property
    def task_id(self) -> str:
        return self._task.id

    @property
    def attempt(self) -> int:
        """Which run of the task this is; the first is 1."""
        return self._task.attempts + 1

    @property
    def fencing_token(self) -> int:
        return self._task.token

    @property
    def queue(self) -> str:
        return self._task.queue

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._task.metadata

    @property
    def deadline(self) -> datetime | None:
        """When the run will be stopped; None when it may take as long as it likes."""
        if self.timeout is None or self._task.started_at is None:
            return None
        return self._task.started_at + timedelta(seconds=self.timeout)

    def progress(self, fraction: float, message: str = "") -> None:
        """Say how far the task is, from 0 to 1. Kept soon, and only the newest.

        Nothing is kept of a run that was told to stop: another may be under way already.
        """
        if not 0 <= fraction <= 1:
            raise InvalidTask(f"progress {fraction!r}: expected a number from 0 to 1")
        text = str(message)[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        if not self.cancelled:
            self._report(
                Progress(
                    task_id=self._task.id,
                    token=self._task.token,
                    fraction=float(fraction),
                    message=text,
                )
            )


def current_task() -> TaskContext:
    """The task that is running here. Raises `OmniqError` outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise OmniqError("current_task() was called outside of a running task") from None


def enter(context: TaskContext) -> None:
    """Make it the current task of this asyncio task or thread."""
    _current.set(context)
