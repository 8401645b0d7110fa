"""Tasks as files in a folder: any number of processes on one machine, and no locks.

Correctness rests on two system calls: rename (of many that move one file, one succeeds) and link
(of many that create one name, one succeeds).

    queue/<id>.task                                 waiting
    queue/<id>.<token>.<owner>.<started>.running    held; `.cancelling` once it is to be cancelled
    queue/<id>.<token>.<nonce>.done                 changed: the record to be is in the part below
    results/<id>.<token>.<nonce>.part               a record to be, synced before its `.done` exists
    results/<id>.result, dead/<id>.dead             ended, dead letter (with the task's record)
    tmp/<id>.task.tmp                               about to be enqueued (see `_files.entrance`)
    workers/, unique/, gates/, schedules/, paused/, notes/    see the modules of `_files`
    corrupt/                                        what was not a record, and a note saying why

Names are of one task each; what is written together is in one file with many names (`_files.gathered`).

Every change of a task goes the same way, whoever makes it: an outcome, a retry, a cancellation, a
lost worker, a dead letter's return. What a crash after each step leaves, and what follows from it:

    step                                     after a crash here
    1 write the part (and sync it)           nothing happened; the part is swept some day
    2 rename the task's file to `.done`      it has happened: the `.done` names the part by its nonce.
      (the claim is gone: the outcome is     Whoever finds the `.done` goes on with step 3
      refused, and the part removed)
    3 rename the part to where it belongs:   done; whoever finds the `.done` without a part removes it.
      results/<id>.result, queue/<id>.task,  Two that do step 3 at once: one rename succeeds, and both
      or the `.running` of a task that       end in the same state
      failed and is not let go of yet
    4 sync the folders, remove the `.done`   –

So there is never a moment with two files that can be claimed, or with none and no `.done`. A claim
is the rename of `.task` to `.running`; the token is in the name, the rest is read from the file
that was won. It is synced with the rest of its turn: a token is not given out twice, not even
after a power cut. A cancellation of a held task is a rename too, of `.running` to `.cancelling`: an
outcome that does not find the one finds the other, and can no longer make the task run again.

When the disk is full, `StorageError` says so, nothing is half written, and everything works again
when there is space.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import StorageClosed, StorageError
from omniq.gate_rules import GateState
from omniq.models import DeadLetter, Progress, QueueStats, Schedule, WorkerInfo
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.file.encoding import Ended
from omniq.storage.file.enqueue import Batch
from omniq.storage.file.record import Holdings
from omniq.storage.file.store import Needs, Store
from omniq.storage.file.store_thread import Worker
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStorage(BaseStorage):
    """A store in a folder of a local disk.

    `settings.durability`: "power" waits for the disk before anything is acknowledged; "os" does
    not, and what was acknowledged in the last seconds before a power cut may be gone or empty.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self.path = Path(path)
        self._holdings = Holdings()
        self._store: Store | None = None
        self._worker: Worker | None = None
        self._pid = 0
        self._waiting = 0
        self._armed: tuple[asyncio.AbstractEventLoop, int] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="file",
            durability=self._settings.durability,
            reach="machine",
            atomic_batches=False,
            exact_bound=False,
        )

    def sibling(self) -> FileStorage:
        sibling = FileStorage(
            self.path,
            serializer=self._serializer,
            clock=self._clock,
            settings=self._settings,
            max_pending=self._max_pending,
        )
        sibling._identity = self._identity
        sibling._is_sibling = True
        sibling._holdings = self._holdings
        sibling._local_wakeups = self._local_wakeups
        return sibling

    # The thread

    async def _open(self) -> None:
        if not self._is_sibling:
            self._holdings = Holdings()
        store = Store(
            Needs(
                root=self.path,
                is_durable=self._settings.durability == "power",
                clock=self._clock,
                serializer=self._serializer,
                max_pending=self._max_pending,
                holdings=self._holdings,
                encode_finish=self._encode_finish,
            )
        )
        try:
            await asyncio.to_thread(store.open)
        except OSError as error:
            raise self._wrapped(error) from error
        self._store, self._worker, self._pid = store, Worker(store.enqueue), os.getpid()

    async def _close(self) -> None:
        worker, store = self._worker, self._store
        self._worker = self._store = None
        self._disarm()
        if worker is None or store is None or self._pid != os.getpid():
            return
        worker.submit(store.close)
        await asyncio.to_thread(worker.stop)

    async def _run(self, act: Callable[[Store], T]) -> T:
        """Run something in the storage's thread."""
        store, worker = self._ready()
        try:
            return await worker.call(lambda: act(store))
        except OSError as error:
            raise self._wrapped(error) from error
        finally:
            self._tell_arrivals(store)

    async def _read(self, act: Callable[[Store], T]) -> T:
        """Run a question in the storage's thread."""
        self._check_open()
        return await self._run(lambda store: _and_flush(store, act))

    def _ready(self) -> tuple[Store, Worker]:
        if self._store is None or self._worker is None:
            raise StorageClosed("the file storage is not open; use it inside 'async with'")
        if self._pid != os.getpid():
            raise StorageError(
                f"the file storage in {self.path} was opened by process {self._pid}; "
                "a forked process must open one of its own"
            )
        return self._store, self._worker

    def _wrapped(self, error: OSError) -> StorageError:
        if error.errno in _FULL:
            return StorageError(
                f"no space left on the disk of {self.path}: nothing was written; "
                "free some space and try again"
            )
        return StorageError(f"the file storage in {self.path} failed: {error}")

    # Tasks

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        store, worker = self._ready()
        try:
            return await worker.enqueue(Batch(rows))
        except OSError as error:
            raise self._wrapped(error) from error
        finally:
            self._tell_arrivals(store)

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        store, worker = self._ready()
        future = worker.submit(lambda: store.turn(owner, entries, claim))
        try:
            recorded, rows = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # Nobody will hear of what was claimed, so nobody may hold it.
            worker.submit(lambda: None if future.cancelled() else store.give_up(future.result()[1]))
            raise
        except OSError as error:
            raise self._wrapped(error) from error
        finally:
            self._tell_arrivals(store)
        if store.claimer.expired:
            expired, store.claimer.expired = store.claimer.expired, []
            self._local_wakeups.notify_results(expired)
        return recorded, rows

    async def _cancel(self, task_id: str, reason: str) -> bool:
        return await self._run(lambda store: store.cancel(task_id, reason))

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        identity = self._identity
        is_first = identity.lease_until == 0 and identity.owner == info.id
        return await self._run(lambda store: store.renew(info, lease, is_first=is_first))

    async def _retire(self, owner: str) -> None:
        await self._run(lambda store: store.retire(owner))

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        return await self._run(lambda store: store.give_back(max_crashes))

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        return await self._run(lambda store: store.leases.set_paused(owner, paused=paused))

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(Store.workers)

    async def held_by(self, owner: str) -> dict[str, int]:
        return await self._read(lambda store: store.held_by(owner))

    # Waiting

    async def _wait_for_work(self, timeout: float) -> None:
        with self._local_wakeups.listen_for_work() as hint:
            next_due, has_news = await self._read(_look_ahead)
            if has_news:
                return
            if next_due is not None:
                remaining = (next_due - self._clock.micros()) / 1_000_000
                timeout = min(timeout, max(0.0, remaining))
            self._waiting += 1
            try:
                self._arm(asyncio.get_running_loop())
                await self._clock.wait(hint, timeout)
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._disarm()

    def _tell_arrivals(self, store: Store) -> None:
        """Whatever was done may have heard of new tasks in place of whoever waits to hear of them."""
        if self._waiting and store.ledger.has_arrivals():
            self._local_wakeups.notify_work()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have changes of the folder looked at, by whichever process, while somebody waits."""
        watch = None if self._store is None else self._store.ledger.watch
        if self._armed is None and watch is not None and self._waiting:
            loop.add_reader(watch.fd, self._on_change)
            self._armed = (loop, watch.fd)

    def _disarm(self) -> None:
        if self._armed is not None:
            (loop, fd), self._armed = self._armed, None
            if not loop.is_closed():
                loop.remove_reader(fd)

    def _on_change(self) -> None:
        """Look at what has changed: most of it is others at work, and nobody need wake for that."""
        if self._armed is None or self._store is None or self._worker is None:
            return
        loop, store = self._armed[0], self._store
        self._disarm()
        look = self._worker.submit(lambda: _look_ahead(store))
        look.add_done_callback(lambda done: _call_in(loop, self._after_look, loop, done))

    def _after_look(
        self, loop: asyncio.AbstractEventLoop, look: Future[tuple[int | None, bool]]
    ) -> None:
        if look.cancelled() or look.exception() is not None or look.result()[1]:
            self._local_wakeups.notify_work()
        else:
            self._arm(loop)

    # Retention

    async def _purge_results(self, before: int) -> int:
        return await self._run(
            lambda store: store.archive.purge(lambda brief: brief.finished_at < before)
        )

    async def _purge_expired(self) -> int:
        return await self._run(Store.purge_expired)

    async def _delete_task(self, task_id: str) -> bool:
        now = self._clock.micros()
        return await self._run(lambda store: store.archive.delete(task_id, now))

    # Dead letters

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        return await self._run(lambda store: store.retry_dead(task_id, body, from_start))

    async def delete_dead(self, task_id: str) -> bool:
        return await self._read(lambda store: store.archive.bury(task_id))

    async def _purge_dead(self, before: int) -> int:
        return await self._read(lambda store: store.archive.purge_dead(before))

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        return await self._read(lambda store: store.archive.letters(query))

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        return await self._read(lambda store: store.get_dead(task_id))

    async def _find_dead_row(self, task_id: str) -> Row | None:
        dead = await self._read(lambda store: store.ledger.read_dead(task_id))
        return None if dead is None else dead.row

    # Checkpoints and progress

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        return await self._run(
            lambda store: store.save_checkpoint(owner, task_id, token, checkpoint)
        )

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        checkpoint = await self._read(lambda store: store.ledger.notes.load(task_id))
        return None if checkpoint is None else checkpoint.data

    async def _purge_checkpoints(self, before: int) -> int:
        return await self._run(lambda store: store.purge_checkpoints(before))

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        await self._run(lambda store: store.report_progress(owner, reports))

    async def get_progress(self, task_id: str) -> Progress | None:
        return await self._read(lambda store: store.ledger.notes.progress(task_id))

    # Schedules

    async def _put_schedule(self, schedule: Schedule) -> None:
        await self._run(lambda store: store.schedules.put(schedule))

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        return await self._read(lambda store: store.schedules.get(schedule_id))

    async def list_schedules(self) -> list[Schedule]:
        return await self._read(lambda store: store.schedules.all())

    async def delete_schedule(self, schedule_id: str) -> bool:
        return await self._read(lambda store: store.schedules.delete(schedule_id))

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        return await self._run(lambda store: store.fire_schedule(schedule, advanced, row))

    # Queues and gates

    async def _set_paused(self, queue: str, paused: bool) -> None:
        await self._run(lambda store: store.set_paused(queue, paused))

    async def paused_queues(self) -> frozenset[str]:
        return await self._read(lambda store: store.claimer.paused())

    async def gates(self) -> dict[str, GateState]:
        return await self._read(lambda store: store.gatekeeper.states())

    # Reading

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        found = await self._read(lambda store: store.ledger.find(task_id))
        if isinstance(found, Ended):
            return found.finished_row
        return None if found is None else found.row

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        live = await self._read(lambda store: store.ledger.find_live(task_id))
        return None if live is None else live.newest

    async def _list(self, query: TaskQuery) -> list[Row]:
        now = self._clock.micros()
        return await self._read(lambda store: store.archive.page(query, now))

    async def _scan(self, query: ScanQuery) -> Scan:
        async def back(before: str, limit: int) -> tuple[list[Row], str | None]:
            now = self._clock.micros()
            return await self._read(lambda store: store.archive.back(query, before, limit, now))

        return await scan_by_id(query, back, self._list)

    async def stats(self) -> QueueStats:
        now = self._clock.micros()
        return await self._read(lambda store: store.archive.stats(now))

    async def count_waiting(self) -> int:
        return await self._read(lambda store: store.count_waiting())


def _and_flush(store: Store, act: Callable[[Store], T]) -> T:
    """The answer; a question may have finished what somebody else had begun."""
    answer = act(store)
    store.ledger.flush()
    return answer


def _look_ahead(store: Store) -> tuple[int | None, bool]:
    """When the next task comes due, and whether others have brought some since the last look."""
    store.ledger.refresh()
    return store.ledger.index.ready.next_due(), store.ledger.has_arrivals()


def _call_in(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *given: object) -> None:
    # The loop may have ended while the thread was looking; then nobody waits in it.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(act, *given)
