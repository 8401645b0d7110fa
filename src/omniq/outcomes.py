"""Everything a run can come to: one closed set, each recorded by one atomic step.

Each outcome names the claim it belongs to, `(task_id, token)`; a storage records it only while
that claim is the current one.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from omniq.models import TaskError, TaskResult


class Succeeded(msgspec.Struct, frozen=True):
    """The function returned. With `next_eta` the task is PENDING again for its next interval.

    `encoded` is the result as the storage's own serializer encodes it, where that was done already.
    """

    task_id: str
    token: int
    result: TaskResult
    next_eta: datetime | None = None
    encoded: bytes | None = None


class Retried(msgspec.Struct, frozen=True):
    """The run failed and the task will run again at `eta`.

    Without `eta` it stays with its owner, RETRYING and not claimable, until `Rescheduled`.
    """

    task_id: str
    token: int
    error: TaskError
    eta: datetime | None = None


class Rescheduled(msgspec.Struct, frozen=True):
    """The owner lets go of the task; it is claimable at `eta`. Charges nothing."""

    task_id: str
    token: int
    eta: datetime


class Failed(msgspec.Struct, frozen=True):
    """The run failed for good: the task is FAILED and a dead letter with that `reason`."""

    task_id: str
    token: int
    error: TaskError
    reason: str = "exhausted"


class Snoozed(msgspec.Struct, frozen=True):
    """The task asked to come back at `eta`: PENDING, no attempt spent."""

    task_id: str
    token: int
    eta: datetime


class Released(msgspec.Struct, frozen=True):
    """The worker gives the task back unrun or interrupted: PENDING, no attempt spent.

    It keeps its place, or comes back at `eta`. `unknown_function` counts it, so that a task nobody
    can run does not go round for ever.
    """

    task_id: str
    token: int
    unknown_function: bool = False
    eta: datetime | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """The task ends as CANCELLED, for that `reason`."""

    task_id: str
    token: int
    reason: str = ""


Outcome = Succeeded | Retried | Rescheduled | Failed | Snoozed | Released | Cancelled
