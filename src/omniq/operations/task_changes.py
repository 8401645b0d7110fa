"""Changes of one task that waits, for queues, handles, the command line and the dashboard."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from omniq import log
from omniq.errors import InvalidTask, TaskNotFound
from omniq.events import TaskChanged
from omniq.models import Task, TaskStatus
from omniq.tasks.durations import Duration, seconds_of

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage


async def change_task(
    storage: BaseStorage,
    task_id: str,
    *,
    priority: int | None = None,
    queue: str | None = None,
    eta: datetime | None = None,
    delay: Duration | None = None,
) -> Task:
    """Give a waiting task what is given here, and log it; return the task as it is now."""
    if delay is not None:
        if eta is not None:
            raise InvalidTask("give either eta or delay, not both")
        eta = storage.clock.now() + timedelta(seconds=seconds_of("delay", delay))
    return _logged(await storage.change_task(task_id, priority=priority, queue=queue, eta=eta))


async def run_task_now(storage: BaseStorage, task_id: str) -> Task:
    """Make a waiting task due now, and log it; return the task as it is now."""
    return _logged(await storage.run_task_now(task_id))


async def enqueue_again(storage: BaseStorage, task_id: str) -> str:
    """Enqueue the same call once more as a new task that is due now; return its id."""
    task = await storage.get_task(task_id) or await storage.get_dead_task(task_id)
    if task is None:
        raise TaskNotFound(task_id)
    now = storage.clock.now()
    again = msgspec.structs.replace(
        task,
        id=storage.clock.new_id(),
        created_at=now,
        eta=None,
        expires=None,
        cron=None,
        interval=None,
        schedule_id=None,
        status=TaskStatus.PENDING,
        attempts=0,
        crashes=0,
        releases=0,
        token=0,
        owner=None,
        started_at=None,
        cancel_requested=False,
        occurrence=0,
    )
    return await storage.enqueue(again)


def _logged(task: Task) -> Task:
    if log.is_enabled():
        event = TaskChanged(
            id=task.id,
            func_path=task.func_path,
            queue=task.queue,
            attempt=task.attempts + task.crashes,
            priority=task.priority,
            eta=task.eta,
        )
        log.write(event)
    return task
