"""Opens a store after a fault and compares its contents with what it had acknowledged."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from omniq.clock import SYSTEM_CLOCK, SystemClock
from omniq.models import Task, TaskStatus
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from tests.faults.history import (
    History,
    Known,
    Log,
    is_whole,
    is_whole_result,
    new_result,
    new_task,
)

_STATUS = {"mark_done": TaskStatus.SUCCESS, "mark_failed": TaskStatus.FAILED}
_BATCH = 200


@dataclass
class Report:
    """What is wrong with a store; without errors all lists are empty.

    `lost` are acknowledged changes that are absent, `torn` are records that differ from what was
    written, `broken` is every other violation: the store refuses to open, gives a task to two
    claims, invents an outcome. `quarantined` counts the records that the store itself moved aside;
    if nothing acknowledged is absent, these are remains of calls that were never acknowledged.
    """

    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    quarantined: int = 0

    @property
    def is_good(self) -> bool:
        """Whether the store has every acknowledged change."""
        return not (self.lost or self.torn or self.broken)

    def save(self, path: Path) -> None:
        """Write the report to a file that another process reads."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read the file of `save`; without a file, the audit itself died."""
        if not path.exists():
            return cls(broken=["the process that opened the store died or hung"])
        return cls(**json.loads(path.read_text()))


class _NextBoot(SystemClock):
    """The clock after a restart of the machine: every earlier lease has expired."""

    def boot_id(self) -> str:
        return f"after {super().boot_id()}"


async def audit(url: str, history: History, log: Log) -> Report:
    """Check every acknowledged change, then run all remaining tasks and use the store once more.

    The tasks that it completes are appended to `log`, for a later audit of the same store.
    """
    report = Report()
    try:
        async with open_storage(url, clock=_NextBoot()) as storage:
            await _compare_all(storage, history, report)
            await _drain(storage, history, log, report)
            await _use(storage, log, report)
    except Exception as error:
        report.broken.append(f"{type(error).__name__}: {error}")
    return report


async def _compare_all(storage: BaseStorage, history: History, report: Report) -> None:
    found: set[str] = set()
    for task_id, known in history.tasks.items():
        task = await storage.get_task(task_id)
        if task is not None:
            found.add(task_id)
            await _compare(storage, task, known, report)
        elif known.is_enqueued or known.outcome is not None:
            report.lost.append(f"{task_id}: the task is gone")
    if storage.capabilities.atomic_batches:
        for batch in history.batches:
            if found.intersection(batch) and not found.issuperset(batch):
                report.broken.append(f"{batch[0]}: only a part of its batch is there")


async def _compare(storage: BaseStorage, task: Task, known: Known, report: Report) -> None:
    task_id = task.id
    if not is_whole(task):
        report.torn.append(f"{task_id}: the task is not what was written")
    if not task.status.is_final:
        charged = task.attempts - task.crashes
        if not known.failures <= charged <= known.tried_failures:
            report.lost.append(f"{task_id}: failed {known.failures} times, knows of {charged}")
    result = await storage.get_result(task_id)
    is_final = result is not None and result.status.is_final
    if result is not None and is_final and not is_whole_result(result):
        report.torn.append(f"{task_id}: the result is not what was written")
    if known.outcome is not None:
        found = result.status if result is not None else None
        if found is not _STATUS[known.outcome] or task.status is not found:
            report.lost.append(f"{task_id}: {known.outcome} was acknowledged, found {found}")
    elif result is not None and is_final:
        possible = {_STATUS[verb] for verb in known.maybe_outcomes}
        if result.status not in possible:
            report.broken.append(f"{task_id}: is {result.status}, which no call recorded")


async def _drain(storage: BaseStorage, history: History, log: Log, report: Report) -> None:
    claimed: set[str] = set()
    await storage.give_back_abandoned()
    while tasks := await log.claim(storage.reserve(_BATCH)):
        for task in tasks:
            _check_claim(task, history, claimed, report)
            claimed.add(task.id)
            await log.call("mark_done", [task.id], storage.mark_done(task.id, new_result(task.id)))
    for task_id, known in history.tasks.items():
        if not known.is_enqueued:
            continue
        result = await storage.get_result(task_id)
        if result is None or not result.status.is_final:
            report.lost.append(f"{task_id}: cannot be claimed and has not ended")


def _check_claim(task: Task, history: History, claimed: set[str], report: Report) -> None:
    known = history.tasks.get(task.id)
    if task.id in claimed:
        report.broken.append(f"{task.id}: claimed twice")
    if known is None:
        report.broken.append(f"{task.id}: claimed, but never enqueued")
        return
    if known.outcome is not None:
        report.broken.append(f"{task.id}: claimed, but {known.outcome} was acknowledged")
    if task.token <= known.token:
        report.broken.append(f"{task.id}: token {task.token} was given out before")
    if not is_whole(task):
        report.torn.append(f"{task.id}: the claimed task is not what was written")


async def _use(storage: BaseStorage, log: Log, report: Report) -> None:
    task = new_task(SYSTEM_CLOCK.new_id())
    await log.call("enqueue", [task.id], storage.enqueue(task))
    claimed = await log.claim(storage.reserve(1))
    if [t.id for t in claimed] != [task.id]:
        report.broken.append(f"{task.id}: enqueued after the fault and not claimable")
        return
    await log.call("mark_done", [task.id], storage.mark_done(task.id, new_result(task.id)))
