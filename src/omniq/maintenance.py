"""The chores of every worker: recover what others dropped, forget what is old, pass on progress.

No leader and no lock: each chore goes through the storage contract, where two that do it at once
do it once. A chore that fails is told of, and tried again at its next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from omniq.clock import Clock
from omniq.errors import OmniqError
from omniq.events import ChoreFailed, Dispatcher, TasksGivenBack
from omniq.models import Progress
from omniq.storage.base import BaseStorage

_JITTER = 0.2


class Maintenance:
    """Loops over the chores until it is cancelled."""

    def __init__(
        self, storage: BaseStorage, events: Dispatcher, *, lease: float, progress_every: float = 0.5
    ) -> None:
        self._storage = storage
        self._clock: Clock = storage.clock
        self._events = events
        self._lease = lease
        self._progress_every = progress_every
        self._progress: dict[str, Progress] = {}

    def report(self, progress: Progress) -> None:
        """Keep the newest progress of a task for the next turn. From any thread."""
        self._progress[progress.task_id] = progress

    async def run(self) -> None:
        """Do all chores again and again."""
        await asyncio.gather(
            self._every(self._lease / 3, self.recover),
            self._every(max(self._lease, 10.0), self.purge),
            self._every(self._progress_every, self.pass_on_progress),
        )

    async def recover(self) -> None:
        """Give back what workers without a lease still hold."""
        owners: dict[str, int] = {}
        for back in await self._storage.give_back_abandoned():
            owners[back.owner] = owners.get(back.owner, 0) + 1
        for owner, count in owners.items():
            self._events.emit(TasksGivenBack(owner=owner, count=count))

    async def purge(self) -> None:
        """Forget finished tasks whose time is over."""
        await self._storage.purge_expired()

    async def pass_on_progress(self) -> None:
        """Write down what running tasks have reported."""
        if self._progress:
            reports, self._progress = self._progress, {}
            await self._storage.report_progress(list(reports.values()))

    async def _every(self, seconds: float, chore: Callable[[], Awaitable[None]]) -> None:
        while True:
            # Jitter, so that workers that were started together do not come all at once.
            await self._clock.sleep(seconds * (1 - _JITTER * self._clock.random()))
            try:
                await chore()
            except OmniqError as error:
                self._events.emit(ChoreFailed(chore=chore.__name__, error=str(error)))
