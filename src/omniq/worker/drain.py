"""Runs what is there until nothing is left: `run_until_empty` of a pool, and `omniq worker --burst`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omniq.events import Dispatcher, WorkerAwaitsLeases
from omniq.models import WorkerInfo
from omniq.storage.base import BaseStorage
from omniq.worker.claim_loop import ClaimLoop
from omniq.worker.maintenance import Maintenance
from omniq.worker.schedule_loop import ScheduleLoop

_PAUSE = 0.25


class Drain:
    """Runs the tasks that are due and that the pool may run, with those that become due meanwhile."""

    def __init__(
        self,
        storage: BaseStorage,
        events: Dispatcher,
        claim_loop: ClaimLoop,
        maintenance: Maintenance,
        schedule_loop: ScheduleLoop,
        end: asyncio.Task[None],
        is_running: Callable[[], bool],
        queues: tuple[str, ...] | None,
    ) -> None:
        """`end`: the asyncio task of the pool. `queues`: those that it serves; None for all."""
        self._storage = storage
        self._events = events
        self._claim_loop = claim_loop
        self._maintenance = maintenance
        self._schedule_loop = schedule_loop
        self._end = end
        self._is_running = is_running
        self._queues = queues

    async def run(self) -> int:
        """Return when nothing that it can run is due and nothing runs, or when the pool has ended.

        Returns 0: what other workers hold is not looked at.
        """
        # Else a worker that always ends soon would never run what a killed one held.
        await self._maintenance.recover()
        await self._schedule_loop.fire_due()
        await self._until_drained()
        while self._is_running() and await self._storage.advance_flows():
            await self._until_drained()
        if self._is_running() and await self._claim_loop.end_unknown():
            await self._until_drained()
        return 0

    async def run_with_killed(self) -> int:
        """The same, and what killed workers held; returns how many tasks other workers hold now.

        Another worker that holds tasks either renews its lease, and works on, or its lease expires.
        """
        await self.run()
        first = {worker.id: worker for worker in await self._holders()}
        unsure = self._unsure(first, list(first.values()))
        if unsure and self._is_running():
            held = sum(len(worker.running) for worker in unsure)
            self._events.emit(
                WorkerAwaitsLeases(owner=self._storage.owner, held=held, workers=len(unsure))
            )
        while unsure and self._is_running():
            await self._storage.clock.sleep(_PAUSE)
            unsure = self._unsure(first, await self._holders())
        if first and self._is_running():
            await self.run()
        return sum(len(worker.running) for worker in await self._holders())

    async def _holders(self) -> list[WorkerInfo]:
        """The other workers of the same queues that hold tasks."""
        return [
            worker
            for worker in await self._storage.workers()
            if worker.running and worker.id != self._storage.owner and self._shares_queue(worker)
        ]

    def _shares_queue(self, worker: WorkerInfo) -> bool:
        both = self._queues and worker.queues
        return not both or not set(both).isdisjoint(self._queues or ())

    @staticmethod
    def _unsure(first: dict[str, WorkerInfo], now: list[WorkerInfo]) -> list[WorkerInfo]:
        """The workers that have not renewed their lease since they were first seen."""
        return [
            worker
            for worker in now
            if worker.id in first and worker.last_heartbeat == first[worker.id].last_heartbeat
        ]

    async def _until_drained(self) -> None:
        ends = (self._claim_loop.until_drained(), self._end)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
