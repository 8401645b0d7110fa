"""Read section: sections that only read. Reads of single tasks that arrive together are one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omniq.clock import Clock
from omniq.storage.backend import Record
from omniq.storage.postgres.section import PostgresSection
from omniq.storage.postgres.statements import Statements

Records = dict[str, Record]


class RecordReader:
    """Reads records with their bodies: those that are asked for at the same time with one statement.

    Every caller gets a record that was read after its own call began. Used on one event loop.
    """

    def __init__(self, statements: Statements, clock: Clock) -> None:
        self.statements = statements
        self.clock = clock
        self._lock = asyncio.Lock()
        self._next: tuple[set[str], asyncio.Task[Records]] | None = None

    async def read(self, task_id: str) -> Records:
        """Return the record if there is one, and perhaps others."""
        if self._next is None:
            ids: set[str] = set()
            self._next = ids, asyncio.create_task(self._read(ids))
            # The callers may have been cancelled when it fails: this marks the error as retrieved.
            self._next[1].add_done_callback(lambda read: read.cancelled() or read.exception())
        ids, reading = self._next
        ids.add(task_id)
        # Shielded, because other callers wait for the same read.
        return await asyncio.shield(reading)

    async def _read(self, ids: set[str]) -> Records:
        async with self._lock:
            # What is asked for from now on is read by the next statement.
            self._next = None
            return await PostgresSection(self.statements, self.clock).load(list(ids), bodies=True)


class ReadSection(PostgresSection):
    """A section that only reads."""

    def __init__(self, reader: RecordReader) -> None:
        super().__init__(reader.statements, reader.clock)
        self._reader = reader

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> Records:
        if len(ids) != 1:
            return await super().load(ids, bodies=bodies)
        found = await self._reader.read(ids[0])
        return {task_id: found[task_id] for task_id in ids if task_id in found}
