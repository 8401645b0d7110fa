"""The memory backend: tables in this process, behind one lock."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.models import WorkerInfo
from omniq.storage.backend import Backend, Changes, Counts, Lease, Work, complete
from omniq.storage.incarnation import STORE, check_reader, decode_record
from omniq.storage.tables import Tables, TablesSection
from omniq.storage.types import Capabilities, Holder, LeaseReply
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")


class Memory:
    """Everything a memory store holds. Its backends share it, each from its own thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tables = Tables()


class MemoryBackend(Backend):
    """A store in this process."""

    def __init__(self, memory: Memory, clock: Clock, wakeups: LocalWakeups) -> None:
        self._memory = memory
        self._clock = clock
        self._wakeups = wakeups

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="memory", durability="none", reach="process")

    async def open(self) -> None:
        """Nothing to open; a store that needs a newer omniq is refused."""
        record = self._memory.tables.document(STORE, STORE)
        check_reader(None if record is None else decode_record(record.data))

    async def close(self) -> None:
        """Nothing to close: the memory is freed with its last backend."""

    def sibling(self) -> MemoryBackend:
        return MemoryBackend(self._memory, self._clock, self._wakeups)

    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        with self._memory.lock:
            tables = self._memory.tables
            section = TablesSection(tables, self._clock.micros())
            if claims_as is not None:
                if not tables.has_lease(self.identity.holder(claims_as)):
                    raise LeaseLost(claims_as)
                section.epoch = tables.epoch
            return complete(work(section))

    async def write(self, changes: Changes) -> None:
        with self._memory.lock:
            self._memory.tables.write(changes, self._clock.micros())

    async def page(self, query: Any) -> Any:
        with self._memory.lock:
            return self._memory.tables.page(query, self._clock.micros())

    async def counts(self, *, only_waiting: bool = False) -> Counts:
        tables, now = self._memory.tables, self._clock.micros()
        with self._memory.lock:
            if only_waiting:
                return Counts(now=now, waiting=tables.count_waiting())
            return tables.counts(now)

    # Leases

    async def leases(self) -> list[Lease]:
        with self._memory.lock:
            return self._memory.tables.list_leases(self._clock.boot_micros())

    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        with self._memory.lock:
            until = self._clock.boot_micros() + length
            return self._memory.tables.renew(info, until, holder)

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        with self._memory.lock:
            now = self._clock.boot_micros()
            return self._memory.tables.fence(owner, now, retires=retires)

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        with self._memory.lock:
            now = self._clock.boot_micros()
            return self._memory.tables.pause_worker(owner, now, paused=paused)

    # Waiting

    async def wait_for_work(self, timeout: float) -> None:
        with self._wakeups.listen_for_work() as notified:
            with self._memory.lock:
                next_due = self._memory.tables.next_due()
            if next_due is not None:
                timeout = min(timeout, max(0.0, (next_due - self._clock.micros()) / 1_000_000))
            await self._clock.wait(notified, timeout)
