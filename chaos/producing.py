"""A producer that writes down what it asked for and what it was told."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import msgspec

from chaos.history import Journal
from chaos.work import Plan
from omniq.errors import OmniqError, StorageError
from omniq.models import Limit, Task
from omniq.storage.base import BaseStorage

WORK = "chaos.work.work"
_TRIES = 40
_GIVES_UP = 0.1
_PAUSE = 0.3
_NEWEST = 100


class Producer:
    """Enqueues and cancels through one storage, which may fail it at any time."""

    def __init__(self, storage: BaseStorage, journal: Journal, draw: random.Random) -> None:
        self._storage = storage
        self._journal = journal
        self._draw = draw
        self.kept: deque[str] = deque(maxlen=_NEWEST)

    async def enqueue(self, task_id: str, plan: Plan) -> None:
        """Until it is known to be there, mostly; else it may be there or not, and nobody knows."""
        task = self._task(task_id, plan)
        self._journal.note("enqueue.try", task_id, value=msgspec.to_builtins(plan))
        for _ in range(_TRIES):
            try:
                (kept,) = await self._storage.enqueue_many([task], nonce=task_id)
            except StorageError:
                if self._draw.random() < _GIVES_UP:
                    return
                await asyncio.sleep(_PAUSE)
                continue
            # Where its key is held, the one that holds it stands for both.
            self._journal.note("enqueue.ok" if kept == task_id else "enqueue.refused", task_id)
            if kept == task_id:
                self.kept.append(task_id)
            return

    async def cancel(self) -> None:
        """Cancel one of those that were enqueued."""
        if not self.kept:
            return
        task_id = self._draw.choice(self.kept)
        self._journal.note("cancel.try", task_id)
        try:
            was_alive = await self._storage.cancel(task_id)
        except StorageError:
            return
        self._journal.note("cancel.ok", task_id, value=was_alive)

    async def revive(self) -> None:
        """Retry one of those that were enqueued, should it be a dead letter by now."""
        if not self.kept:
            return
        task_id = self._draw.choice(self.kept)
        self._journal.note("revive.try", task_id)
        with suppress(OmniqError):
            await self._storage.retry_dead(task_id)

    def _task(self, task_id: str, plan: Plan) -> Task:
        # The journal's clock first: time that passes in between makes the task late, not early.
        left = plan.eta - self._journal.now()
        now = self._storage.clock.now()
        eta = now + timedelta(seconds=left) if plan.eta else None
        return Task(
            id=task_id,
            func_path=WORK,
            args=(msgspec.to_builtins(plan),),
            created_at=now,
            eta=eta,
            max_retries=plan.max_retries,
            unique=plan.unique or None,
            limits=tuple(_limits(plan)),
        )


def _limits(plan: Plan) -> Iterator[Limit]:
    if plan.group and plan.span:
        yield Limit(key=plan.group, rate=plan.width, per=plan.span)
    elif plan.group:
        yield Limit(key=plan.group, max_running=plan.width)
