"""Every way in which a run can end: a closed set, each recorded in one atomic step.

Each outcome names the claim it belongs to, `(task_id, token)`; a storage records it only while
that claim is the current one.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from omniq.models import TaskError, TaskResult


class Succeeded(msgspec.Struct, frozen=True):
    """The function returned. With `next_eta` the task is PENDING again for its next interval.

    `encoded` is the result in the encoding of the storage's serializer, if it was encoded already.
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
    """The owner releases the task; it is claimable at `eta`. No attempt is spent."""

    task_id: str
    token: int
    eta: datetime


class Failed(msgspec.Struct, frozen=True):
    """The run failed for good: the task is FAILED and a dead letter with that `reason`.

    With the reason `crashed` it counts as a crash: the run was interrupted, and may not be repeated.
    With `next_eta` a repeating task goes on: it is PENDING again for its next interval, and its newest
    result is this failure. `hook` names the owner that calls the function's `on_dead` hook; empty for
    any worker that has the function, None if there is no such hook.
    """

    task_id: str
    token: int
    error: TaskError
    reason: str = "exhausted"
    next_eta: datetime | None = None
    hook: str | None = None


class Snoozed(msgspec.Struct, frozen=True):
    """The task raised `Snooze`: PENDING until `eta`, no attempt spent."""

    task_id: str
    token: int
    eta: datetime
    reason: str = ""


class Suspended(msgspec.Struct, frozen=True):
    """The task waits for the ends of other records: PENDING and not claimable, no attempt spent.

    It is claimable when `enough` of the records `on` have ended (None: all of them), or at `until`.
    """

    task_id: str
    token: int
    on: tuple[str, ...]
    enough: int | None = None
    until: datetime | None = None


class Released(msgspec.Struct, frozen=True):
    """The worker returns the task unrun or interrupted: PENDING, no attempt spent.

    It keeps its position, or is due again at `eta`. `unknown_function`: the worker does not have the
    function; `Task.releases` counts that.
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


Outcome = Succeeded | Retried | Rescheduled | Failed | Snoozed | Suspended | Released | Cancelled
