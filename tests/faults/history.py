"""What a writer did to a store before a fault, and what the store must contain afterwards.

The writer appends a line before each call and another after it, to a log outside the store.
Between the two lines a call may or may not have taken effect; after the second it must have.
A task's arguments and result follow from its id, so a reader can distinguish an intact record from
a torn one without a copy of what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from omniq.models import Task, TaskError, TaskResult, TaskStatus

T = TypeVar("T")

FUNC_PATH = "tests.faults.history.payload"


def payload(task_id: str) -> str:
    """Return the argument of the task with this id: mostly short, sometimes several blocks long.

    >>> payload("a") == payload("a") != payload("b")
    True
    """
    digest = hashlib.sha256(task_id.encode()).hexdigest()
    repeats = 150 if digest[0] == "0" else int(digest[1], 16)
    return digest * (1 + repeats)


def new_task(task_id: str) -> Task:
    """Return the task with this id, due immediately."""
    return Task(id=task_id, func_path=FUNC_PATH, args=(payload(task_id),))


def new_result(task_id: str) -> TaskResult:
    """Return the result that the worker records for the task with this id."""
    return TaskResult(task_id=task_id, status=TaskStatus.SUCCESS, result=payload("r" + task_id))


def new_error(task_id: str) -> TaskError:
    """Return the error with which the task with this id fails, if it fails."""
    return TaskError(payload("e" + task_id)[:64])


def is_whole(task: Task) -> bool:
    """Whether the task has exactly the contents that were written."""
    return task.func_path == FUNC_PATH and tuple(task.args) == (payload(task.id),)


def is_whole_result(result: TaskResult) -> bool:
    """Whether the result has exactly the contents that were written."""
    if result.status is TaskStatus.SUCCESS:
        return bool(result.result == payload("r" + result.task_id))
    if result.error is None:
        return False
    # A task whose worker was lost too often fails with an error that the storage makes.
    return result.error.message == new_error(result.task_id).message or (
        result.error.error_type == "WorkerLost"
    )


class Log:
    """Appends each call of the writer and its outcome; each line is one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(
        self, event: str, verb: str, ids: Iterable[str] = (), *, tokens: Iterable[int] = ()
    ) -> None:
        """Append one line. `event` is `try` before a call, `ok` or the error's name after it."""
        line = {
            "event": event,
            "verb": verb,
            "ids": list(ids),
            "tokens": list(tokens),
            "at": time.monotonic_ns(),
        }
        # With O_APPEND the offset has no effect. No storage makes this call, so that the log's
        # writes are not among the calls that are made to fail.
        os.pwritev(self._file, [json.dumps(line).encode() + b"\n"], 0)

    async def call(self, verb: str, ids: Iterable[str], act: Awaitable[T]) -> T:
        """Await the call with a line before it, and one after it if it succeeds."""
        known = list(ids)
        self.note("try", verb, known)
        value = await act
        self.note("ok", verb, known)
        return value

    async def claim(self, act: Awaitable[list[Task]]) -> list[Task]:
        """Await a claim; the line after it has the claimed tasks and their tokens."""
        self.note("try", "reserve")
        tasks = await act
        self.note("ok", "reserve", [t.id for t in tasks], tokens=[t.token for t in tasks])
        return tasks


@dataclass
class Known:
    """What the log says about one task."""

    is_enqueued: bool = False
    token: int = 0
    failures: int = 0
    tried_failures: int = 0
    outcome: str | None = None
    maybe_outcomes: set[str] = field(default_factory=set)


@dataclass
class History:
    """All calls, by task id; a call without its second line may or may not have taken effect."""

    tasks: dict[str, Known] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)

    def add(self, path: Path, *, until: int | None = None) -> None:
        """Read one writer's log. A last line that the writer's death has truncated is ignored.

        So is an acknowledgement after `until` (monotonic nanoseconds), when the power was off.
        """
        if not path.exists():
            return
        for raw in path.read_bytes().split(b"\n")[:-1]:
            line = json.loads(raw)
            match line["event"]:
                case "try":
                    self._tried(line["verb"], line["ids"])
                case "ok" if until is not None and line["at"] >= until:
                    continue
                case "ok":
                    self._acknowledged(line["verb"], line["ids"], line["tokens"])
                case name:
                    self.errors.append((line["verb"], name))

    @property
    def acknowledged(self) -> int:
        """How many changes the store has acknowledged: tasks stored and outcomes recorded."""
        return sum(k.is_enqueued + k.failures + (k.outcome is not None) for k in self.known())

    def known(self) -> Iterable[Known]:
        """Return what the log says about each task."""
        return self.tasks.values()

    def _tried(self, verb: str, ids: list[str]) -> None:
        if verb == "enqueue":
            self.batches.append(ids)
        for task_id in ids:
            known = self.tasks.setdefault(task_id, Known())
            match verb:
                case "mark_done" | "mark_failed":
                    known.maybe_outcomes.add(verb)
                case "mark_retry":
                    known.tried_failures += 1

    def _acknowledged(self, verb: str, ids: list[str], tokens: list[int]) -> None:
        for task_id in ids:
            known = self.tasks.setdefault(task_id, Known())
            match verb:
                case "enqueue":
                    known.is_enqueued = True
                case "mark_done" | "mark_failed":
                    known.outcome = verb
                case "mark_retry":
                    known.failures += 1
        for task_id, token in zip(ids, tokens, strict=False):
            self.tasks[task_id].token = max(self.tasks[task_id].token, token)
