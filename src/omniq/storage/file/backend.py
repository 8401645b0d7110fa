"""The file backend: runs the store in its thread, and watches its folder for work.

A blocking caller uses the store in its own thread, while no other call does.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from omniq.clock import Clock
from omniq.concurrency.callers_lock import CallersLock
from omniq.concurrency.event_loop import has_event_loop
from omniq.errors import StorageClosed, StorageError
from omniq.models import WorkerInfo
from omniq.settings import Settings
from omniq.storage.backend import Backend, Counts, Lease, Work
from omniq.storage.file.leases import OwnClaims
from omniq.storage.file.section import FileSection
from omniq.storage.file.store import Store
from omniq.storage.types import Capabilities, Holder, LeaseReply
from omniq.storage.wakeups import LocalWakeups

T = TypeVar("T")

_CLOSED = "the file storage was closed during the call"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileBackend(Backend):
    """A folder of a local disk."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        wakeups: LocalWakeups,
        settings: Settings,
        own_claims: OwnClaims | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._wakeups = wakeups
        self._settings = settings
        self._shared_claims = own_claims
        self._own_claims = own_claims or OwnClaims()
        self._store: Store | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()
        self._submitted: set[Future[Any]] = set()
        self.callers_lock: CallersLock = CallersLock()
        self.waiting = 0
        self._watching: tuple[asyncio.AbstractEventLoop, int] | None = None
        self._checking: asyncio.Future[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="file", durability=self._settings.durability, reach="machine", exact_bound=False
        )

    @property
    def is_idle(self) -> bool:
        return not self._submitted

    def sibling(self) -> FileBackend:
        return FileBackend(self._path, self._clock, self._wakeups, self._settings, self._own_claims)

    async def open(self) -> None:
        if self._shared_claims is None:
            self._own_claims = OwnClaims()
        store = Store(self._path, self._clock, self._own_claims, self._settings)
        try:
            await asyncio.to_thread(store.open)
        except OSError as error:
            raise self._wrap_error(error) from error
        self._store, self._thread = store, ThreadPoolExecutor(1, "omniq-files")

    async def close(self) -> None:
        thread, store = self._thread, self._store
        self._thread = self._store = None
        self._unwatch_folder()
        if self._checking is not None:
            self._checking.cancel()
        if thread is not None and store is not None:
            self._submit(thread, store.close)
            await asyncio.to_thread(thread.shutdown)

    async def _run(
        self, work: Callable[[Store], T], on_cancel: Callable[[], None] | None = None
    ) -> T:
        """Run `work` in the store's thread; `on_cancel` too, afterwards, if the caller is cancelled.

        Called in a thread without an event loop, it is run there, and this coroutine does not suspend.
        """
        store, thread = self._store, self._thread
        if store is None or thread is None:
            raise StorageClosed(_CLOSED)
        try:
            if not has_event_loop():
                return self._run_in_caller(store, work)
            # One that a wrapper or a signal handler has started in the thread of a caller.
            self.callers_lock.refuse_nested()
            future = self._submit(thread, lambda: work(store))
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if on_cancel is not None:
                self._submit(thread, on_cancel)
            raise
        except OSError as error:
            raise self._wrap_error(error) from error
        finally:
            self._notify_arrivals(store)

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        def run() -> T:
            with self._turn:
                return work()

        try:
            future = thread.submit(run)
        except RuntimeError as error:
            # The thread was shut down: by `close`, or because the interpreter ends.
            raise StorageClosed(_CLOSED) from error
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    def _run_in_caller(self, store: Store, work: Callable[[Store], T]) -> T:
        with self._turn:
            if store is not self._store:
                raise StorageClosed(_CLOSED)
            try:
                return work(store)
            except Exception:
                raise
            except BaseException:
                store.interrupt()
                raise

    def _wrap_error(self, error: OSError) -> StorageError:
        if error.errno in _FULL:
            return StorageError(
                f"no space left on the disk of {self._path}: nothing was written; "
                "free some space and try again"
            )
        return StorageError(f"the file storage in {self._path} failed: {error}")

    # Sections, pages and counts

    async def transact(
        self, work: Work[T], *, claims_as: str | None = None, writes: bool = True
    ) -> T:
        sections: list[tuple[Store, FileSection]] = []
        holder = None if claims_as is None else self.identity.holder(claims_as)

        def run(store: Store) -> T:
            section = store.section()
            sections.append((store, section))
            return store.transact(section, work, holder)

        def undo() -> None:
            # The caller does not learn what was claimed, so the claims are undone.
            for store, section in sections:
                if section.claimed:
                    store.undo_claims(section)

        return await self._run(run, undo)

    async def page(self, query: Any) -> Any:
        return await self._run(lambda store: store.queries().page(query))

    async def counts(self, *, only_waiting: bool = False) -> Counts:
        def count(store: Store) -> Counts:
            queries = store.queries()
            if only_waiting:
                return Counts(now=self._clock.micros(), waiting=queries.count_waiting())
            return queries.counts()

        return await self._run(count)

    # Leases

    async def leases(self) -> list[Lease]:
        return await self._run(Store.all_leases)

    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        return await self._run(lambda store: store.renew(info, length, holder))

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        return await self._run(lambda store: store.fence(owner, retires=retires))

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        return await self._run(
            lambda store: store.leases.set_paused(owner, store.epoch, paused=paused)
        )

    # Waiting

    async def wait_for_work(self, timeout: float) -> None:
        with self._wakeups.listen_for_work() as notified:
            next_due, has_arrivals = await self._run(Store.check_for_work)
            if has_arrivals:
                return
            if next_due is not None:
                remaining = (next_due - self._clock.micros()) / 1_000_000
                timeout = min(timeout, max(0.0, remaining))
            self.waiting += 1
            try:
                self._watch_folder()
                await self._clock.wait(notified, timeout)
            finally:
                self.waiting -= 1
                if not self.waiting:
                    self._unwatch_folder()

    def _notify_arrivals(self, store: Store) -> None:
        """Wake the waiters if the last call has read events of new tasks, which they now miss."""
        if self.waiting and store.files.has_arrivals():
            self._wakeups.notify_work()

    def _watch_folder(self) -> None:
        """While a caller waits for work, have its event loop watch the folder for changes."""
        watch = None if self._store is None else self._store.files.watch
        if self._watching is None and watch is not None and self.waiting:
            loop = asyncio.get_running_loop()
            loop.add_reader(watch.fd, self._on_folder_change)
            self._watching = (loop, watch.fd)

    def _unwatch_folder(self) -> None:
        if self._watching is not None:
            (loop, fd), self._watching = self._watching, None
            if not loop.is_closed():
                loop.remove_reader(fd)

    def _on_folder_change(self) -> None:
        self._unwatch_folder()
        self._checking = asyncio.ensure_future(self._check_folder())

    async def _check_folder(self) -> None:
        """Check whether a change has added tasks: most changes do not, and need wake no caller."""
        try:
            # This notifies the waiters, if there are new tasks.
            await self._run(Store.check_for_work)
            self._watch_folder()
        except StorageError:
            self._wakeups.notify_work()
