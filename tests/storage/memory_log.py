"""A log in memory, which can be made to fail: for tests of the log backend without a server."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import StorageError
from omniq.settings import Settings
from omniq.storage.log import Log, LogStorage, Trimmed
from omniq.storage.log.encoding import Commit, Effects, decode_commit, encode_commit
from omniq.storage.types import Capabilities
from omniq.testing.clock import ManualClock

CAPABILITIES = Capabilities(name="log", durability="none", reach="fleet")


class Records:
    """What the server of a log holds. Each process has a `MemoryLog` on it."""

    def __init__(self, kept: int = 1_000) -> None:
        self.kept = kept
        """Commits that stay behind a snapshot, for those who look for their own."""
        self.lock = threading.Lock()
        self.end = 0
        self.commits: dict[int, bytes] = {}
        self.snapshot: tuple[int, bytes] | None = None
        self.connections = 0
        self.appends = 0
        self.reads = 0

    def append(self, number: int, data: bytes) -> bool:
        with self.lock:
            self.appends += 1
            if number <= self.end:
                return False
            assert number == self.end + 1, "a commit behind a gap"
            self.end = number
            self.commits[number] = data
            return True

    def read(self, first: int) -> list[bytes]:
        with self.lock:
            self.reads += 1
            numbers = range(first, self.end + 1)
            if numbers and first not in self.commits:
                raise Trimmed(f"commit {first} was deleted")
            return [self.commits[number] for number in numbers]

    def save_snapshot(self, number: int, data: bytes) -> None:
        with self.lock:
            if self.snapshot is None or self.snapshot[0] < number:
                self.snapshot = number, data
                for old in [old for old in self.commits if old <= number - self.kept]:
                    del self.commits[old]

    def newest(self) -> Commit:
        """The last commit."""
        return decode_commit(self.commits[self.end])

    def append_foreign(self, number: int) -> None:
        """Append a commit of another process under that number, if it is free."""
        with self.lock:
            last = self.commits.get(number - 1)
            if last is None and self.snapshot is not None and self.snapshot[0] == number - 1:
                last = self.snapshot[1]
        before = Commit("", "", 0, 0, 0, Effects()) if last is None else decode_commit(last)
        foreign = msgspec.structs.replace(
            before, id=f"foreign-{number}", previous=before.id, effects=Effects()
        )
        self.append(number, encode_commit(foreign))


class Faults:
    """Chooses what goes wrong with an append, at random. Never twice in a row for one connection.

    After a second fault the replica waits, and a `ManualClock` stands still.
    """

    KINDS = ("delay", "conflict", "lost reply", "lost request", "nobody wins")

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)
        self._was_fault = False

    def __call__(self) -> str | None:
        self._was_fault = not self._was_fault and self._random.random() < self._share
        return self._random.choice(self.KINDS) if self._was_fault else None


class MemoryLog(Log):
    """A connection to `Records`. `fault` names what goes wrong with the next append, or returns None."""

    def __init__(
        self, records: Records, clock: Clock, fault: Callable[[], str | None] = lambda: None
    ) -> None:
        self._records = records
        self._clock = clock
        self._fault = fault

    def now(self) -> int:
        return self._clock.micros()

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def append(self, number: int, data: bytes) -> bool:
        match self._fault():
            case "delay":
                await asyncio.sleep(0.001)
            case "conflict":
                self._records.append_foreign(number)
            case "lost reply":
                self._records.append(number, data)
                raise StorageError("the reply was lost")
            case "lost request":
                raise StorageError("the request was lost")
            case "nobody wins":
                return False
        return self._records.append(number, data)

    async def read(self, first: int) -> list[bytes]:
        return self._records.read(first)

    async def load_snapshot(self) -> tuple[int, bytes] | None:
        return self._records.snapshot

    async def save_snapshot(self, number: int, data: bytes) -> None:
        await asyncio.sleep(0)
        self._records.save_snapshot(number, data)


def log_storage(records: Records, clock: Clock, *, faults: float = 0, **options: Any) -> LogStorage:
    """A storage object with its own replica of the log; this share of its appends goes wrong."""

    def connect() -> MemoryLog:
        records.connections += 1
        return MemoryLog(records, clock, Faults(faults, seed=records.connections))

    return LogStorage(
        connect,
        capabilities=CAPABILITIES,
        clock=clock,
        **options,
    )


class MemoryLogStore:
    """A store for the state machine: each object has its own replica, and the log has faults."""

    def __init__(self, clock: ManualClock, settings: Settings, max_pending: int | None) -> None:
        self._records = Records()
        self._make = partial(
            log_storage,
            self._records,
            clock,
            faults=0.2,
            settings=settings,
            max_pending=max_pending,
            snapshot_bytes=2_000,
        )

    def another(self) -> LogStorage:
        return self._make()

    async def reopen(self) -> None:
        """Do nothing: each object loads the log when it is opened."""

    async def discard(self) -> None:
        """Do nothing: Python frees the memory."""
