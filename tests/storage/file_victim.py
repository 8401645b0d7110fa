"""A process that changes a file store in every possible way, until a failpoint kills it.

    OMNIQ_FAILPOINTS=file.record.after_commit=kill@2 python -m tests.storage.file_victim FOLDER
    OMNIQ_FAILPOINTS=file.recover.before_part=kill python -m tests.storage.file_victim FOLDER recover

The second only recovers what the first has left. Both print a line for each promise that the store
has made: `enqueued ID`, `ended ID STATUS`.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from omniq.clock import SystemClock
from omniq.models import Limit, Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import Released, Snoozed
from omniq.settings import Settings
from omniq.storage.file import FileStorage

ONE_AT_A_TIME = (Limit(key="k", max_running=1),)


class NextBoot(SystemClock):
    """The clock after a restart of the machine: every lease taken before it has ended."""

    def __init__(self, boots: int = 1) -> None:
        super().__init__()
        self._boots = boots

    def boot_id(self) -> str:
        return f"{self._boots} after {super().boot_id()}"


def report(*fields: object) -> None:
    """Print a promise for the parent process."""
    sys.stdout.write(" ".join(map(str, fields)) + "\n")
    sys.stdout.flush()


async def use(folder: Path) -> None:
    """Enqueue, claim, succeed, retry, snooze, fail, cancel, retry a dead letter, lose a worker.

    Also wait for a limit.
    """
    settings = Settings(durability="os")
    async with FileStorage(folder, settings=settings) as storage:
        await enqueue(storage, "a")
        await enqueue(storage, "b", "c", "d", "e", "f")
        await claim(storage, 5)
        await storage.mark_done("a", TaskResult(task_id="a", status=TaskStatus.SUCCESS))
        report("ended", "a", "success")
        await storage.mark_failed("b", TaskError("again"), will_retry=True)
        await storage.reschedule("b", datetime.now(UTC))
        await storage.mark_failed("c", TaskError("no"), will_retry=False)
        report("ended", "c", "failed")
        later = datetime.now(UTC) + timedelta(milliseconds=1)
        await storage.record([Snoozed("d", 1, later)])
        assert await storage.cancel("e")
        await storage.record([Released("e", 1)])
        report("ended", "e", "cancelled")
        assert await storage.cancel("f")
        report("ended", "f", "cancelled")
        report("retried", "c")
        assert await storage.retry_dead("c")
        await enqueue(storage, "g", "h", unique=True)
        await claim(storage, 3)
        await enqueue(storage, "i", "j", queue="limited", limits=ONE_AT_A_TIME)
        (first,) = await storage.reserve(2, queues=["limited"])
        await storage.mark_done(first.id, TaskResult(task_id=first.id, status=TaskStatus.SUCCESS))
        report("ended", first.id, "success")
        assert len(await storage.reserve(2, queues=["limited"])) == 1
    async with (
        FileStorage(folder, settings=settings, clock=NextBoot()) as recovering,
        FileStorage(folder, settings=settings) as lost,
    ):
        await claim(lost, 2)
        await recovering.give_back_abandoned()


async def enqueue(
    storage: FileStorage,
    *ids: str,
    unique: bool = False,
    queue: str = "default",
    limits: tuple[Limit, ...] = (),
) -> None:
    """Enqueue a batch, and report each task."""
    keys = {task_id: f"key {task_id}" if unique else None for task_id in ids}
    await storage.enqueue_many(
        [
            Task(id=task_id, func_path="m.f", unique=keys[task_id], queue=queue, limits=limits)
            for task_id in ids
        ]
    )
    for task_id in ids:
        report("enqueued", task_id)


async def claim(storage: FileStorage, limit: int) -> None:
    """Claim that many tasks, and check that there were enough."""
    claimed = await storage.reserve(limit)
    assert len(claimed) == limit, claimed


async def recover(folder: Path) -> None:
    """Only recover what a killed process has left."""
    async with FileStorage(folder, settings=Settings(durability="os"), clock=NextBoot()) as storage:
        await storage.give_back_abandoned()


if __name__ == "__main__":
    asyncio.run((recover if "recover" in sys.argv else use)(Path(sys.argv[1])))
