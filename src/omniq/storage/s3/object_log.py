"""The commits of a log, one object for each."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from omniq.clock import Clock
from omniq.errors import StorageError
from omniq.storage.log import Log, Trimmed
from omniq.storage.s3 import server_check, snapshots
from omniq.storage.s3.connection import S3Connection
from omniq.storage.s3.trimming import KEPT_FOR, Trimming, numbered
from omniq.storage.store_clock import StoreClock

_MOST_AT_ONCE = 16
_STEP = 1_000_000
"""The resolution of the server's times in microseconds: objects have whole seconds."""

_SHORTEST_READING, _LONGEST_READING = 1_300_000, 60_000_000
"""Microseconds between two readings of the server's time. After the first few, the estimate is precise enough."""


class S3Log(Log):
    """A connection to the log of a store: the port of `omniq.storage.log`."""

    def __init__(self, objects: S3Connection, clock: Clock, kept_for: int = KEPT_FOR) -> None:
        self._objects = objects
        self._clock = clock
        self._trimming = Trimming(objects, clock, kept_for)
        self._is_open = False
        self._reading: asyncio.Task[None] | None = None
        self._read_at = 0
        self._pause = _SHORTEST_READING

    def now(self) -> int:
        return self._clock.micros()

    async def open(self) -> None:
        if self._is_open:
            return
        await server_check.check(self._objects)
        if isinstance(self._clock, StoreClock):
            sent_at = self._clock.boot_micros()
            await self._objects.put("clock", b"")
            await self._read_clock("clock", sent_at)
        self._is_open = True

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def append(self, number: int, data: bytes) -> bool:
        began_at = self._clock.boot_micros()
        name = f"log/{numbered(number)}"
        if not await self._objects.create(name, data):
            return False
        try:
            await self._trimming.check(number)
        except Trimmed:
            # No other process would read the object that was just created.
            return False
        self._trimming.prove(began_at, number)
        self._refresh_clock(name, began_at)
        return True

    async def read(self, first: int) -> list[bytes]:
        began_at = self._clock.boot_micros()
        found: list[bytes] = []
        at_once = 1
        is_first = True
        while True:
            start = first + len(found)
            names = [f"log/{numbered(start + each)}" for each in range(at_once)]
            records = await asyncio.gather(*map(self._objects.get, names))
            for record in records:
                if record is None:
                    break
                found.append(record)
            if len(found) < start - first + at_once:
                break
            at_once = 1 if is_first else min(_MOST_AT_ONCE, at_once * 2)
            is_first = False
        await self._trimming.check(first)
        self._trimming.prove(began_at, first + len(found) - 1)
        return found

    async def load_snapshot(self) -> tuple[int, bytes] | None:
        self._trimming.forget()
        return await snapshots.load(self._objects)

    async def save_snapshot(self, number: int, data: bytes) -> None:
        await snapshots.save(self._objects, self._clock, number, data)
        await self._trimming.trim()

    # The server's time

    def _refresh_clock(self, name: str, sent_at: int) -> None:
        """Compare the clocks from time to time, by the time of an object that this process has written."""
        if not isinstance(self._clock, StoreClock) or self._reading is not None:
            return
        if sent_at - self._read_at > self._pause:
            self._pause = min(_LONGEST_READING, self._pause * 2)
            self._reading = asyncio.create_task(self._read_again(name, sent_at))

    async def _read_again(self, name: str, sent_at: int) -> None:
        # If it fails, a later commit is used.
        with suppress(StorageError):
            await self._read_clock(name, sent_at)
        self._reading = None

    async def _read_clock(self, name: str, sent_at: int) -> None:
        written_at = await self._objects.modified(name)
        self._read_at = self._clock.boot_micros()
        if written_at is not None and isinstance(self._clock, StoreClock):
            self._clock.observe(written_at, sent_at=sent_at, step=_STEP)
