"""Storage: tasks as files in a folder that any number of processes on one machine share.

There are no locks. Correctness rests on two system calls: rename (of several processes that move
one file, one succeeds) and link (of several processes that create one name, one succeeds).

    queue/<id>.task                                 waiting
    queue/<id>.<token>.<owner>.<started>.running    held; `.cancelling` after a cancel request
    queue/<id>.<token>.<nonce>.done                 a committed change; the part has the new record
    results/<id>.<token>.<nonce>.part               a new record, synced before its `.done` exists
    results/<id>.result, dead/<id>.dead             ended; dead letter (with the task's record)
    tmp/<id>.task.tmp                               about to be enqueued (see `enqueue`)
    workers/, unique/, gates/                       see `leases`, `unique_keys`, `gates`
    schedules/, paused/, notes/                     see `schedules`; paused queues; `checkpoints`
    corrupt/                                        files that are not records, and the reasons

Each name belongs to one task. Records that are written together share a file with many names (see
`shared_file`).

All changes of a task use the same protocol: an outcome, a retry, a cancellation, the recovery of a
task from a dead worker, the retry of a dead letter. The state after a crash, and what follows:

    step                                     after a crash here
    1 write the part (and sync it)           no change; the part is removed later (`purge_expired`)
    2 rename the task's file to `.done`;     the change is committed: the `.done` names the part by
      if the file is gone, the outcome is    its nonce. A process that finds the `.done` continues
      refused and the part is removed        with step 3
    3 rename the part to its final name:     the change is complete. A process that finds the
      results/<id>.result, queue/<id>.task,  `.done` without a part removes it. If two processes do
      or the `.running` of a task that has   step 3 at the same time, one rename succeeds, and the
      failed and is not released yet         state is the same for both
    4 sync the folders, remove the `.done`   –

So a task never has two files that can be claimed, and never has neither a file nor a `.done`. A
claim is the rename of `.task` to `.running`. The token is in the name; the other fields are read
from the renamed file. The rename is synced before the claim is returned: no token is given out
twice, not even after a power cut. A cancellation of a held task is a rename too, of `.running` to
`.cancelling`: an outcome that does not find the first name finds the second, and cannot make the
task run again.

When the disk is full, calls raise `StorageError`, no file is left incomplete, and the storage works
again when there is space.
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
from omniq.storage.file.record import HeldTasks
from omniq.storage.file.store import Store, StoreOptions
from omniq.storage.file.store_thread import StoreThread
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStorage(BaseStorage):
    """A store in a folder of a local disk.

    With `settings.durability` "power", calls are acknowledged after the data is on the disk. With
    "os" they are not: a power cut may lose what was acknowledged in the seconds before it.
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
        self._held_tasks = HeldTasks()
        self._store: Store | None = None
        self._thread: StoreThread | None = None
        self._pid = 0
        self._waiting = 0
        self._watching: tuple[asyncio.AbstractEventLoop, int] | None = None

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
        sibling._held_tasks = self._held_tasks
        sibling._local_wakeups = self._local_wakeups
        return sibling

    # The thread

    async def _open(self) -> None:
        if not self._is_sibling:
            self._held_tasks = HeldTasks()
        store = Store(
            StoreOptions(
                root=self.path,
                is_durable=self._settings.durability == "power",
                clock=self._clock,
                serializer=self._serializer,
                max_pending=self._max_pending,
                held_tasks=self._held_tasks,
                encode_finish=self._encode_finish,
            )
        )
        try:
            await asyncio.to_thread(store.open)
        except OSError as error:
            raise self._wrap_error(error) from error
        self._store, self._thread, self._pid = store, StoreThread(store.enqueue), os.getpid()

    async def _close(self) -> None:
        thread, store = self._thread, self._store
        self._thread = self._store = None
        self._unwatch_folder()
        if thread is None or store is None or self._pid != os.getpid():
            return
        thread.submit(store.close)
        await asyncio.to_thread(thread.stop)

    async def _run(self, work: Callable[[Store], T]) -> T:
        """Run `work` in the storage's thread."""
        store, thread = self._opened()
        try:
            return await thread.call(lambda: work(store))
        except OSError as error:
            raise self._wrap_error(error) from error
        finally:
            self._notify_arrivals(store)

    async def _read(self, work: Callable[[Store], T]) -> T:
        """Check that the storage is open, then run `work` in its thread, and flush."""
        self._check_open()
        return await self._run(lambda store: _then_flush(store, work))

    def _opened(self) -> tuple[Store, StoreThread]:
        if self._store is None or self._thread is None:
            raise StorageClosed("the file storage is not open; use it inside 'async with'")
        if self._pid != os.getpid():
            raise StorageError(
                f"the file storage in {self.path} was opened by process {self._pid}, and used in "
                f"process {os.getpid()} after a fork; open a separate storage in each process"
            )
        return self._store, self._thread

    def _wrap_error(self, error: OSError) -> StorageError:
        if error.errno in _FULL:
            return StorageError(
                f"no space left on the disk of {self.path}: nothing was written; "
                "free some space and try again"
            )
        return StorageError(f"the file storage in {self.path} failed: {error}")

    # Tasks

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        store, thread = self._opened()
        try:
            return await thread.enqueue(Batch(rows))
        except OSError as error:
            raise self._wrap_error(error) from error
        finally:
            self._notify_arrivals(store)

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        store, thread = self._opened()
        future = thread.submit(lambda: store.record_and_claim(owner, entries, claim))
        try:
            recorded, rows = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The caller does not learn what was claimed, so the claims are undone.
            thread.submit(
                lambda: None if future.cancelled() else store.undo_claims(future.result()[1])
            )
            raise
        except OSError as error:
            raise self._wrap_error(error) from error
        finally:
            self._notify_arrivals(store)
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
        with self._local_wakeups.listen_for_work() as notified:
            next_due, has_arrivals = await self._read(_check_for_work)
            if has_arrivals:
                return
            if next_due is not None:
                remaining = (next_due - self._clock.micros()) / 1_000_000
                timeout = min(timeout, max(0.0, remaining))
            self._waiting += 1
            try:
                self._watch_folder(asyncio.get_running_loop())
                await self._clock.wait(notified, timeout)
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._unwatch_folder()

    def _notify_arrivals(self, store: Store) -> None:
        """Wake the waiters if the last call has read events of new tasks, which they now miss."""
        if self._waiting and store.task_files.has_arrivals():
            self._local_wakeups.notify_work()

    def _watch_folder(self, loop: asyncio.AbstractEventLoop) -> None:
        """While a caller waits for work, have the event loop watch the queue folder for changes."""
        watch = None if self._store is None else self._store.task_files.watch
        if self._watching is None and watch is not None and self._waiting:
            loop.add_reader(watch.fd, self._on_folder_change)
            self._watching = (loop, watch.fd)

    def _unwatch_folder(self) -> None:
        if self._watching is not None:
            (loop, fd), self._watching = self._watching, None
            if not loop.is_closed():
                loop.remove_reader(fd)

    def _on_folder_change(self) -> None:
        """Check whether a change has added tasks: most changes do not, and need wake no caller."""
        if self._watching is None or self._store is None or self._thread is None:
            return
        loop, store = self._watching[0], self._store
        self._unwatch_folder()
        check = self._thread.submit(lambda: _check_for_work(store))
        check.add_done_callback(lambda done: _call_soon(loop, self._after_check, loop, done))

    def _after_check(
        self, loop: asyncio.AbstractEventLoop, check: Future[tuple[int | None, bool]]
    ) -> None:
        if check.cancelled() or check.exception() is not None or check.result()[1]:
            self._local_wakeups.notify_work()
        else:
            self._watch_folder(loop)

    # Retention

    async def _purge_results(self, before: int) -> int:
        return await self._run(
            lambda store: store.finished.purge(lambda summary: summary.finished_at < before)
        )

    async def _purge_expired(self) -> int:
        return await self._run(Store.purge_expired)

    async def _delete_task(self, task_id: str) -> bool:
        now = self._clock.micros()
        return await self._run(lambda store: store.finished.delete(task_id, now))

    # Dead letters

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        return await self._run(lambda store: store.retry_dead(task_id, body, from_start))

    async def delete_dead(self, task_id: str) -> bool:
        return await self._read(lambda store: store.finished.delete_dead(task_id))

    async def _purge_dead(self, before: int) -> int:
        return await self._read(lambda store: store.finished.purge_dead(before))

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        return await self._read(lambda store: store.finished.list_dead(query))

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        return await self._read(lambda store: store.get_dead(task_id))

    async def _find_dead_row(self, task_id: str) -> Row | None:
        dead = await self._read(lambda store: store.task_files.read_dead(task_id))
        return None if dead is None else dead.row

    # Checkpoints and progress

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        return await self._run(
            lambda store: store.save_checkpoint(owner, task_id, token, checkpoint)
        )

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        checkpoint = await self._read(lambda store: store.task_files.checkpoints.load(task_id))
        return None if checkpoint is None else checkpoint.data

    async def _purge_checkpoints(self, before: int) -> int:
        return await self._run(lambda store: store.purge_checkpoints(before))

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        await self._run(lambda store: store.report_progress(owner, reports))

    async def get_progress(self, task_id: str) -> Progress | None:
        return await self._read(lambda store: store.task_files.checkpoints.progress(task_id))

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
        return await self._read(lambda store: store.gates.states())

    # Reading

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        found = await self._read(lambda store: store.task_files.find(task_id))
        if isinstance(found, Ended):
            return found.finished_row
        return None if found is None else found.row

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        live = await self._read(lambda store: store.task_files.find_live(task_id))
        return None if live is None else live.newest

    async def _list(self, query: TaskQuery) -> list[Row]:
        now = self._clock.micros()
        return await self._read(lambda store: store.finished.list_rows(query, now))

    async def _scan(self, query: ScanQuery) -> Scan:
        async def read_backwards(before: str, limit: int) -> tuple[list[Row], str | None]:
            now = self._clock.micros()
            return await self._read(
                lambda store: store.finished.read_backwards(query, before, limit, now)
            )

        return await scan_by_id(query, read_backwards, self._list)

    async def stats(self) -> QueueStats:
        now = self._clock.micros()
        return await self._read(lambda store: store.finished.stats(now))

    async def count_waiting(self) -> int:
        return await self._read(lambda store: store.count_waiting())


def _then_flush(store: Store, work: Callable[[Store], T]) -> T:
    """Return the result of `work`, after a flush: it may have finished changes of others."""
    result = work(store)
    store.task_files.flush()
    return result


def _check_for_work(store: Store) -> tuple[int | None, bool]:
    """Return when the next task is due, and whether tasks were added since the last claim."""
    store.task_files.refresh()
    return store.task_files.index.ready.next_due(), store.task_files.has_arrivals()


def _call_soon(loop: asyncio.AbstractEventLoop, work: Callable[..., None], *given: object) -> None:
    # The loop may have been closed meanwhile; then it has no waiters.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(work, *given)
