"""Tasks, results, errors and outcomes for tests, with defaults for the fields a test does not set."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, assert_never

from omniq.models import Task, TaskError, TaskResult, TaskStatus, TaskWorkflow
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Rescheduled,
    Retried,
    Snoozed,
    Succeeded,
)
from omniq.tasks.task_output import OutputBatch, StoredChunk, encode_chunk

OutcomeKind = Literal[
    "succeeded", "retried", "held", "rescheduled", "failed", "snoozed", "released", "cancelled"
]
"""The outcomes by name. `held` is a failure whose task its owner holds until it is rescheduled."""

FINAL_KINDS: tuple[OutcomeKind, ...] = ("succeeded", "failed", "cancelled")
"""Outcomes after which the task has ended."""

RELEASING_KINDS: tuple[OutcomeKind, ...] = ("retried", "rescheduled", "snoozed", "released")
"""Outcomes after which the task waits for its next claim."""


def a_task(task_id: str | None = None, /, **fields: Any) -> Task:
    """A task that is due immediately, with a new id unless one is given.

    >>> a_task("a", priority=3).priority
    3
    """
    if task_id is not None:
        fields["id"] = task_id
    return Task(**{"func_path": "tasks.work", **fields})


def some_tasks(ids: Iterable[str], /, **fields: Any) -> list[Task]:
    """One task for each id, with equal fields otherwise.

    >>> [task.id for task in some_tasks("abc")]
    ['a', 'b', 'c']
    """
    return [a_task(task_id, **fields) for task_id in ids]


_OF_WORKFLOW = (
    "kind",
    "parent",
    "after",
    "after_any",
    "is_open",
    "stops",
    "sequence",
    "halts",
)


def a_member(task_id: str, /, **fields: Any) -> Task:
    """A task that is part of a workflow; `fields` are those of the task and of its workflow.

    >>> a_member("b", after=("a",), priority=3).workflow.after
    ('a',)
    """
    part = {name: fields.pop(name) for name in _OF_WORKFLOW if name in fields}
    return a_task(task_id, workflow=TaskWorkflow(**part), **fields)


def a_result(task: Task, value: object = None, **fields: Any) -> TaskResult:
    """A successful result of the task, with that value."""
    return TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, result=value, **fields)


def an_error(message: str = "boom", **facts: Any) -> TaskError:
    """An error as a worker records it.

    >>> an_error().error_type
    'ValueError'
    """
    return TaskError(message, **{"error_type": "ValueError", **facts})


def an_outcome(kind: OutcomeKind, task: Task, eta: datetime) -> Outcome:
    """An outcome of the claimed task; `eta` is the time of the next run, if there is one."""
    claim = (task.id, task.token)
    match kind:
        case "succeeded":
            return Succeeded(*claim, a_result(task, "value"))
        case "retried":
            return Retried(*claim, an_error(), eta)
        case "held":
            return Retried(*claim, an_error())
        case "rescheduled":
            return Rescheduled(*claim, eta)
        case "failed":
            return Failed(*claim, an_error())
        case "snoozed":
            return Snoozed(*claim, eta)
        case "released":
            return Released(*claim)
        case "cancelled":
            return Cancelled(*claim, "not wanted")
        case _:
            assert_never(kind)


def an_output(
    task_id: str, token: int, *values: Any, first: int = 1, attempt: int = 1
) -> OutputBatch:
    """Chunks of the output of a claimed task, given as values, or as they are stored.

    >>> an_output("a", 1, "x", "y", first=3).first
    3
    """
    chunks = [
        value if isinstance(value, StoredChunk) else StoredChunk(0, encode_chunk(value))
        for value in values
    ]
    return OutputBatch(task_id=task_id, token=token, attempt=attempt, first=first, chunks=chunks)
