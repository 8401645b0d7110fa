"""The tasks and dead letters that a bulk change is for: their ids, in steps of a thousand.

They are read in order of id, which every storage has: each record that existed throughout is in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from omniq.models import DeadLetter, Task, TaskStatus, check_instant, check_int, check_name
from omniq.operations.bulk_actions import all_tasks
from omniq.operations.failed_tasks import failed_so
from omniq.operations.search_query import TaskSearch
from omniq.operations.task_match import matches
from omniq.storage.base import BaseStorage

STEP = 1_000
"""How many records one step changes at most."""

_AT_ONCE = 32

_WITH_ERRORS = (TaskStatus.RUNNING, TaskStatus.RETRYING, TaskStatus.FAILED)
"""The statuses of tasks that are found by an error or a worker, as a search finds them."""

Steps = AsyncIterator[Sequence[str]]


def can_be_cancelled(task: Task) -> bool:
    """Whether a cancel would change it."""
    return not (task.status.is_final or task.cancel_requested)


def can_be_deleted(task: Task) -> bool:
    """Whether it has ended."""
    return task.status.is_final


def can_be_changed(task: Task) -> bool:
    """Whether it waits."""
    return task.status in (TaskStatus.PENDING, TaskStatus.RETRYING) and task.owner is None


def can_be_made_due(now: datetime) -> Callable[[Task], bool]:
    """Whether it waits for a later time."""
    return lambda task: can_be_changed(task) and task.eta is not None and task.eta > now


def lacks(values: Mapping[str, Any]) -> Callable[[Task], bool]:
    """Whether it waits, and has other values than these."""
    return lambda task: (
        can_be_changed(task) and any(getattr(task, name) != value for name, value in values.items())
    )


def new_values(
    *, priority: int | None = None, queue: str | None = None, eta: datetime | None = None
) -> dict[str, Any]:
    """Those that are given. Raises `InvalidTask` for what every task would refuse, before one is read."""
    if priority is not None:
        check_int("priority", priority, low=-(2**63))
    if queue is not None:
        check_name("queue", queue)
    check_instant("eta", eta)
    given = {"priority": priority, "queue": queue, "eta": eta}
    return {name: value for name, value in given.items() if value is not None}


async def select_tasks(
    storage: BaseStorage,
    wanted: TaskSearch,
    fits: Callable[[Task], bool],
    *,
    and_dead: bool = False,
) -> Steps:
    """The tasks that match and fit. What has been changed must no longer fit: it can then be repeated.

    `and_dead`: a search by error or worker also finds dead letters whose task has no record any more.
    """
    ids: list[str] = []
    tasks = all_tasks(
        storage,
        status=wanted.status,
        queue=wanted.queue,
        func_path=wanted.func_path,
        task_type=wanted.task_type,
    )
    async for task in tasks:
        if not (fits(task) and matches(task, wanted)):
            continue
        if wanted.reads_failures and not (
            task.status in _WITH_ERRORS and await failed_so(storage, task.id, wanted, task.owner)
        ):
            continue
        ids.append(task.id)
        if len(ids) == STEP:
            yield ids
            ids = []
    if ids:
        yield ids
    if and_dead and wanted.reads_failures:
        async for dead in select_dead(storage, wanted):
            if left := [each for each in dead if await storage.get_task(each) is None]:
                yield left


async def select_dead(
    storage: BaseStorage,
    wanted: TaskSearch,
    *,
    reason: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    fits: Callable[[DeadLetter], bool] = lambda letter: True,
) -> Steps:
    """The dead letters whose task matches, which failed in this time."""
    if wanted.status not in (None, TaskStatus.FAILED):
        return
    after = ""
    while page := await storage.list_dead(
        func_path=wanted.func_path,
        reason=reason,
        since=since,
        until=until,
        limit=STEP,
        after=after,
        task_type=wanted.task_type,
    ):
        letters = [each for each in page if fits(each) and _matches_letter(each, wanted)]
        if ids := await _whose_task_matches(storage, letters, wanted):
            yield ids
        after = page[-1].task_id


def _matches_letter(letter: DeadLetter, wanted: TaskSearch) -> bool:
    return (
        wanted.queue in (None, letter.queue)
        and wanted.function.lower() in letter.func_path.lower()
        and letter.task_id.startswith(wanted.prefix)
        and wanted.error.lower() in letter.error_details.lower()
    )


async def _whose_task_matches(
    storage: BaseStorage, letters: Sequence[DeadLetter], wanted: TaskSearch
) -> list[str]:
    ids = [letter.task_id for letter in letters]
    # The others are facts of the letter. A dead letter has FAILED, whatever its record says.
    rest = msgspec.structs.replace(wanted, status=None, task_type=None, error="")
    if not (rest.since or rest.until or rest.metadata or rest.args or rest.words or rest.worker):
        return ids
    found: list[str] = []
    for start in range(0, len(ids), _AT_ONCE):
        part = ids[start : start + _AT_ONCE]
        tasks = await asyncio.gather(*map(storage.get_dead_task, part))
        for task in tasks:
            if task is None or not matches(task, rest):
                continue
            if not rest.worker or await failed_so(storage, task.id, rest, None):
                found.append(task.id)
    return found
