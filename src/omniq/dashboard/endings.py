"""How the tasks of a list ended: how long their last run took, and its error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from omniq.models import Task, TaskResult
from omniq.storage.base import BaseStorage

_MAX_KNOWN = 5_000
_MAX_READ = 100
_PARALLEL = 8


class Ending(msgspec.Struct, frozen=True):
    """The seconds that the last run took, if they are known, and its error on one line."""

    took: float | None = None
    error: str = ""


class Endings:
    """Reads the results of tasks that ended, each once: a result does not change."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._known: dict[tuple[str, int], Ending] = {}
        self._slots = asyncio.Semaphore(_PARALLEL)
        # The event loop alone would let go of reads that nothing waits for.
        self._reading: set[asyncio.Future[list[BaseException | None]]] = set()

    async def of(self, tasks: Sequence[Task], patience: float) -> dict[str, Ending]:
        """What is known within `patience` seconds, by id; the other reads go on for the next request."""
        ended = [task for task in tasks if task.status.is_final][:_MAX_READ]
        missing = [task for task in ended if (task.id, task.token) not in self._known]
        if missing:
            reading = asyncio.gather(*map(self._read, missing), return_exceptions=True)
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
            await asyncio.wait((reading,), timeout=patience)
        known = {task.id: self._known.get((task.id, task.token)) for task in ended}
        return {task_id: ending for task_id, ending in known.items() if ending is not None}

    async def close(self) -> None:
        """Stop all reads."""
        for reading in tuple(self._reading):
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read(self, task: Task) -> None:
        key = (task.id, task.token)
        async with self._slots:
            if key not in self._known:
                self._known[key] = _ending_of(await self._storage.get_result(task.id))
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]


def _ending_of(result: TaskResult | None) -> Ending:
    if result is None:
        return Ending()
    started, finished, error = result.started_at, result.finished_at, result.error
    took = (finished - started).total_seconds() if started and finished else None
    line = "" if error is None else f"{error.error_type}: {error.message}"
    return Ending(took, line)
