"""The log backend: the engine's port over one commit thread for each process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from omniq.clock import Clock
from omniq.concurrency.futures import finish
from omniq.concurrency.process_id import PROCESS_ID
from omniq.errors import LeaseLost, StorageClosed, StorageError
from omniq.models import WorkerInfo
from omniq.storage.backend import Backend, Counts, Lease, Moved, Work, complete
from omniq.storage.incarnation import STORE, check_reader, decode_record
from omniq.storage.log.commit_thread import CommitThread, Run
from omniq.storage.log.log import Log
from omniq.storage.log.replica import SNAPSHOT_BYTES, Replica
from omniq.storage.tables import Tables, TablesSection
from omniq.storage.types import Capabilities, Holder, LeaseReply
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")


class Connection:
    """The commit thread that the backends of one process share while any of them is open."""

    def __init__(
        self,
        connect: Callable[[], Log],
        clock: Clock,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        commit_bytes: int = 0,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._snapshot_sizes = snapshot_bytes, commit_bytes
        self._lock = threading.Lock()
        self._users = 0
        self._process = 0
        self._thread: CommitThread | None = None

    async def open(self) -> CommitThread:
        """Start the thread, unless it runs, and load the log."""
        with self._lock:
            thread = self._thread
            if thread is not None and self._process != PROCESS_ID.number:
                raise StorageError(
                    f"process {self._process} has opened this storage, and this is a fork of it; make a "
                    "separate storage in each process"
                )
            self._users += 1
            if thread is None:
                self._process = PROCESS_ID.number
                log = self._connect()
                replica = Replica(log, self._clock.new_id(), self._clock, *self._snapshot_sizes)
                thread = self._thread = CommitThread(log, replica)
        try:
            await self._begin(thread)
        except BaseException:
            await self.close()
            raise
        return thread

    async def _begin(self, thread: CommitThread) -> None:
        """Have the thread load the log."""
        await thread.call(_do_nothing, writes=False)

    async def close(self) -> None:
        """Stop the thread, if no other backend uses it."""
        with self._lock:
            self._users -= 1
            if self._users or self._thread is None:
                return
            thread, self._thread = self._thread, None
        await self._end(thread)

    async def _end(self, thread: CommitThread) -> None:
        await thread.stop()


class LogBackend(Backend):
    """A store on a log."""

    def __init__(
        self,
        connection: Connection,
        capabilities: Capabilities,
        clock: Clock,
        wakeups: LocalWakeups,
        *,
        margin: int = 0,
    ) -> None:
        """`margin`: microseconds by which the times of two processes may differ. Leases are extended by it."""
        self._connection = connection
        self._capabilities = capabilities
        self._clock = self.store_clock = clock
        self._margin = margin
        self._wakeups = wakeups
        self._thread: CommitThread | None = None
        self._next_due: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open(self) -> None:
        thread = await self._connection.open()
        if self._thread is not None:
            await self._connection.close()
            return
        self._thread = thread
        try:
            record = await self.transact(
                lambda section: section.document(STORE, STORE), writes=False
            )
            # Refuse a store that needs a newer omniq.
            check_reader(None if record is None else decode_record(record.data))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._thread is not None:
            self._thread = None
            await self._connection.close()

    def sibling(self) -> LogBackend:
        # The thread is separate from every event loop that uses it, so that siblings can share it.
        return LogBackend(
            self._connection,
            self._capabilities,
            self._clock,
            self._wakeups,
            margin=self._margin,
        )

    async def _call(self, run: Run[_T], *, writes: bool = True) -> _T:
        thread = self._thread
        if thread is None:
            raise StorageClosed("the storage is not open")
        result = await thread.call(run, writes=writes)
        self._note_next_due(thread.next_due)
        return result

    def _note_next_due(self, due: int | None) -> None:
        """Record when a delayed task becomes visible, for waits that have already begun."""
        if due != self._next_due:
            self._next_due = due
            self._wakeups.notify_next_due()

    def _section(self, tables: Tables, now: int) -> TablesSection:
        return TablesSection(tables, now)

    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        holder = None if claims_as is None else self.identity.holder(claims_as)

        def run(tables: Tables, now: int) -> _T:
            section = self._section(tables, now)
            if holder is not None:
                if not tables.has_lease(holder):
                    raise LeaseLost(holder.owner)
                section.epoch = tables.epoch
            try:
                return complete(work(section))
            except Moved:
                # Only what it did not read has moved: no other thread changes these tables meanwhile.
                return complete(work(section))

        return await self._call(run, writes=writes)

    async def page(self, query: Any) -> Any:
        return await self._call(lambda tables, now: tables.page(query, now), writes=False)

    async def counts(self, *, only_waiting: bool = False) -> Counts:
        def count(tables: Tables, now: int) -> Counts:
            if only_waiting:
                return Counts(now=now, waiting=tables.count_waiting())
            return tables.counts(now)

        return await self._call(count, writes=False)

    async def leases(self) -> list[Lease]:
        return await self._call(lambda tables, now: tables.list_leases(now), writes=False)

    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        length += self._margin
        return await self._call(lambda tables, now: tables.renew(info, now + length, holder))

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        return await self._call(lambda tables, now: tables.fence(owner, now, retires=retires))

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        return await self._call(lambda tables, now: tables.pause_worker(owner, now, paused=paused))

    async def wait_for_work(self, timeout: float) -> None:
        deadline = self._clock.monotonic() + timeout
        with self._wakeups.listen_for_work() as notified:
            while not notified.done():
                with self._wakeups.listen_for_next_due() as changed:
                    pause = deadline - self._clock.monotonic()
                    if self._next_due is not None:
                        due_in = (self._next_due - self._clock.micros()) / 1_000_000
                        pause = min(pause, max(0.0, due_in))
                    notified.add_done_callback(lambda _, changed=changed: finish(changed))  # type: ignore[misc]
                    if not await self._clock.wait(changed, pause):
                        return


def _do_nothing(tables: Tables, now: int) -> None:
    """A call that only waits until the log is loaded."""
