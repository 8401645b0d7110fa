"""A producer that records its requests and the replies of the storage."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from chaos.history import Journal
from chaos.tasks import WEIGHTS, Plan
from omniq.errors import InvalidTask, OmniqError, StorageError
from omniq.models import FairShare, Limit, Task, TaskWorkflow
from omniq.storage.base import BaseStorage

WORK, WORK_TOGETHER = "chaos.tasks.work", "chaos.tasks.work_together"
CHANGED = "changed"
"""The limit whose width is changed during the run."""
KINDS = ("shares", "strict", "units", "rate", "replaces", "batch", "changes")
"""Of flow control."""
_TRIES = 40
_GIVE_UP_CHANCE = 0.1
_WAIT_CHANCE = 0.1
_PAUSE = 0.3
_NEWEST = 100


class Producer:
    """Enqueues and cancels through one storage, which may fail at any time."""

    def __init__(self, storage: BaseStorage, journal: Journal, draw: random.Random) -> None:
        self._storage = storage
        self._journal = journal
        self._draw = draw
        self.enqueued: deque[str] = deque(maxlen=_NEWEST)

    async def enqueue(self, task_id: str, plan: Plan) -> None:
        """Enqueue, usually until it is acknowledged; otherwise the outcome is unknown."""
        if plan.replaces:
            # The runs say which arguments they have.
            plan = msgspec.structs.replace(plan, text=task_id)
        may_wait = not (plan.sequence or plan.is_controlled)
        if self.enqueued and may_wait and self._draw.random() < _WAIT_CHANCE:
            plan = msgspec.structs.replace(plan, after=self._draw.choice(self.enqueued))
        task = self._task(task_id, plan)
        self._journal.note("enqueue.try", task_id, value=msgspec.to_builtins(plan))
        for _ in range(_TRIES):
            try:
                (stored,) = await self._storage.enqueue_many([task], nonce=task_id)
            except StorageError:
                if self._draw.random() < _GIVE_UP_CHANCE:
                    return
                await asyncio.sleep(_PAUSE)
                continue
            except InvalidTask:
                # The task that it waits for has ended, and its record was purged.
                self._journal.note("enqueue.refused", task_id)
                return
            # If its unique key is taken, the reply is the id of the task that has the key.
            if plan.replaces and stored != task_id:
                self._journal.note("enqueue.replaced", task_id, value=stored)
                return
            self._journal.note("enqueue.ok" if stored == task_id else "enqueue.refused", task_id)
            if stored == task_id:
                self.enqueued.append(task_id)
            return

    async def cancel(self) -> None:
        """Cancel one of the enqueued tasks."""
        if not self.enqueued:
            return
        task_id = self._draw.choice(self.enqueued)
        self._journal.note("cancel.try", task_id)
        try:
            had_not_ended = await self._storage.cancel(task_id)
        except StorageError:
            return
        self._journal.note("cancel.ok", task_id, value=had_not_ended)

    async def change_limit(self) -> None:
        """Give a limit another width."""
        width = self._draw.randint(1, 4)
        self._journal.note("limit.try", CHANGED, value=width)
        with suppress(StorageError):
            await self._storage.set_limit(CHANGED, max_running=width)
            self._journal.note("limit.ok", CHANGED, value=width)

    async def retry_dead(self) -> None:
        """Retry one of the enqueued tasks, if it is a dead letter now."""
        if not self.enqueued:
            return
        task_id = self._draw.choice(self.enqueued)
        self._journal.note("retry_dead.try", task_id)
        with suppress(OmniqError):
            await self._storage.retry_dead(task_id)

    def _task(self, task_id: str, plan: Plan) -> Task:
        # The journal's clock first: time that passes in between makes the task late, not early.
        left = plan.eta - self._journal.now()
        now = self._storage.clock.now()
        eta = now + timedelta(seconds=left) if plan.eta else None
        workflow = None
        if plan.after or plan.strict:
            after = (plan.after,) if plan.after else ()
            workflow = TaskWorkflow(after_any=after, sequence=plan.strict or None)
        fair = FairShare(key=plan.tenant, weight=WEIGHTS[plan.tenant]) if plan.tenant else None
        return Task(
            id=task_id,
            func_path=WORK_TOGETHER if plan.batch else WORK,
            queue="fair" if fair else "default",
            args=(msgspec.to_builtins(plan),),
            created_at=now,
            eta=eta,
            max_retries=plan.max_retries,
            unique=plan.unique or plan.replaces or None,
            on_conflict="replace" if plan.replaces else "keep",
            limits=tuple(_limits(plan)),
            fair=fair,
            workflow=workflow,
        )


def _limits(plan: Plan) -> Iterator[Limit]:
    if plan.group and plan.span:
        yield Limit(key=plan.group, rate=plan.width, per=plan.span, cost=plan.units or None)
    elif plan.group:
        yield Limit(key=plan.group, max_running=plan.width, cost=plan.units or None)


def controlled(draw: random.Random, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """What a plan has that tests flow control, of one of these kinds."""
    match draw.choice(kinds):
        case "shares":
            return {"tenant": draw.choice(sorted(WEIGHTS))}
        case "strict":
            return {"strict": draw.choice(("s1", "s2"))}
        case "units":
            return {"group": "units", "width": 4, "units": draw.choice((1, 1, 2, 3, 6))}
        case "rate":
            units = draw.choice((1, 2, 4, 9))
            return {"group": "units of a rate", "width": 6, "span": 3.0, "units": units}
        case "replaces":
            return {"replaces": draw.choice(("k1", "k2"))}
        case "batch":
            return {"batch": True}
        case _:
            return {"group": CHANGED, "width": 2, "changes": True}
