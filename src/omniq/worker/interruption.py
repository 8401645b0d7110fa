"""How a task ends whose run its worker has to interrupt."""

from __future__ import annotations

from datetime import datetime

from omniq.models import Task, TaskError
from omniq.outcomes import Failed, Released


def interruption(task: Task, why: str, now: datetime) -> Released | Failed:
    """The outcome of a run that had begun: the task runs again, unless it may run only once."""
    if not task.runs_at_most_once:
        return Released(task.id, task.token)
    error = TaskError(
        f"{why}, and the task may run only once",
        error_type="WorkerLost",
        timestamp=now,
    )
    return Failed(task.id, task.token, error, "crashed", hook="")
