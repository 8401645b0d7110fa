"""The processes of a real run, forked in milliseconds from a process that has all imports."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from chaos import task_writes
from chaos.history import Journal, current, journal_file
from chaos.observers import observe_lease, observe_pool
from chaos.producer import Producer, controlled
from chaos.store_reader import audit, read_store
from chaos.stores import Store
from chaos.tasks import Plan, tick
from omniq import failpoints
from omniq.errors import OmniqError, StorageError
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.settings import Settings
from omniq.storage.base import BaseStorage

LEASE, POLL = 1.0, 0.1
MANY_CRASHES = 1_000_000
_BACKLOG = 4
_RETRY = 0.05
_SLEEPERS = 30
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
_BEAT, _STALL = 0.02, 0.1


class Fork:
    """A forked process; its journal has the same name."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.status: int | None = None

    @property
    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, from any sender."""
        return self.has_ended and self.status == signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait that long; return whether it has ended."""
        deadline = time.monotonic() + seconds
        while not self.has_ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


class ProcessFactory:
    """Forks the processes of one run. The forking process has one thread and no event loop."""

    def __init__(self, store: Store, folder: Path, seed: int) -> None:
        self.store = store
        self.path = folder / "events"
        self._log = folder / "log"
        self._draw = random.Random(seed)
        self._started = 0
        self.journal = journal_file("nemesis", self.path)
        # The garbage collector of a child does not scan the objects that exist now.
        gc.freeze()

    def fork(
        self, kind: str, main: Callable[[Store, Journal, random.Random], Coroutine[Any, Any, None]]
    ) -> Fork:
        self._started += 1
        name, seed = f"{kind}-{self._started}", self._draw.getrandbits(64)
        pid = os.fork()
        if pid == 0:
            self._run_child(name, seed, main)
        return Fork(name, pid)

    def _run_child(
        self, name: str, seed: int, main: Callable[..., Coroutine[Any, Any, None]]
    ) -> NoReturn:
        status = 1
        try:
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            # The child dies when the run itself is killed.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            random.seed(seed)
            journal = journal_file(name, self.path)
            current.set(journal)
            asyncio.run(main(self.store, journal, random.Random(seed)))
            status = 0
        except BaseException:
            sys.stderr.write(f"{name}: {traceback.format_exc()}\n")
        finally:
            sys.stderr.flush()
            os._exit(status)


def open_queue(store: Store) -> AsyncTaskQueue:
    settings = Settings(max_crashes=MANY_CRASHES, result_ttl=86_400)
    return AsyncTaskQueue(store.url, settings=settings)


def _stop_on_term() -> asyncio.Event:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def worker(
    store: Store,
    journal: Journal,
    _: random.Random,
    *,
    concurrency: int = 3,
    failpoint_rules: str = "",
    notes_resources: bool = False,
    watch: Callable[[BaseStorage], None] = lambda _: None,
) -> None:
    """Work until SIGTERM. `failpoint_rules` is the text that configures failpoints."""
    stop = _stop_on_term()
    failpoints.configure(failpoint_rules)
    while not stop.is_set():
        try:
            await _work(store, journal, stop, concurrency, notes_resources, watch)
        except OmniqError:
            # Start again after a pause, as a supervisor would. The server may be down.
            await asyncio.sleep(_RETRY)
    if passed := failpoints.hits():
        journal.note("passed", value=passed)


async def _work(
    store: Store,
    journal: Journal,
    stop: asyncio.Event,
    concurrency: int,
    notes_resources: bool,
    watch: Callable[[BaseStorage], None],
) -> None:
    queue = open_queue(store)
    watch(queue.storage)
    observe_lease(queue.storage, journal)
    pool = queue.worker(
        concurrency=concurrency, poll_interval=POLL, base_retry_delay=0.05, lease=LEASE
    )
    observe_pool(pool, journal)
    async with queue:
        await pool.start()
        stopping = asyncio.ensure_future(stop.wait())
        ended = asyncio.ensure_future(pool.wait())
        resources = asyncio.ensure_future(_note_resources(journal, notes_resources))
        try:
            await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
            await pool.stop(5.0, cancel_in_flight=True)
        finally:
            for waiting in (stopping, ended, resources):
                waiting.cancel()
            with suppress(OmniqError, asyncio.CancelledError):
                await ended


async def _note_resources(journal: Journal, is_enabled: bool) -> None:
    while is_enabled:
        # The first sample is late, when connections, threads and caches exist.
        await asyncio.sleep(10)
        journal.note(
            "resources",
            value={
                "files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
                "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            },
        )


async def producer(
    store: Store,
    journal: Journal,
    draw: random.Random,
    *,
    failpoint_rules: str = "",
    pause: float = 0.01,
) -> None:
    """Enqueue until SIGTERM, as fast as the workers run tasks."""
    stop = _stop_on_term()
    failpoints.configure(failpoint_rules)
    queue = open_queue(store)
    await persist(queue.open)
    producing = Producer(queue.storage, journal, draw)
    number = 0
    while not stop.is_set():
        with suppress(StorageError):
            # A long queue would hide how soon a dead worker's tasks run again.
            if await queue.storage.count_waiting() > _BACKLOG:
                await asyncio.sleep(pause)
                continue
        for _ in range(draw.randint(1, 8)):
            number += 1
            plan = _plan(draw, journal, number, writes=store.has_transactions)
            await producing.enqueue(f"{journal.by}.{number:06}", plan)
        if draw.random() < 0.05:
            await producing.cancel()
        if draw.random() < 0.05:
            await producing.change_limit()
        await asyncio.sleep(pause)
    with suppress(StorageError):
        await queue.close()


def _plan(draw: random.Random, journal: Journal, number: int, *, writes: bool) -> Plan:
    seconds, kind = draw.choice((0.0, 0.005, 0.02, 0.06)), draw.randrange(28)
    if kind >= 20:
        return Plan(seconds=seconds, max_retries=1000, text=str(number), **controlled(draw))
    return Plan(
        seconds=seconds,
        failures=draw.choice((1, 2, 2000)) if kind == 0 else 0,
        max_retries=3 if kind == 0 else 1000,
        fatal=kind == 1,
        snoozes=int(kind == 2),
        steps=draw.randint(1, 3) if kind == 3 else 0,
        eta=journal.now() + draw.uniform(0, 2) if kind == 4 else 0.0,
        unique=draw.choice(("u1", "u2")) if kind == 5 else "",
        group="g" if kind == 6 else "",
        width=2 if kind == 6 else 0,
        writes=writes and kind in (7, 8, 9),
        text=f"argument {number} " * draw.choice((1, 1, 20)),
    )


async def sleeper_tasks(store: Store, journal: Journal, draw: random.Random) -> None:
    """Enqueue tasks that run for about as long as a lease, for the workers that are stopped."""
    queue = open_queue(store)
    await persist(queue.open)
    producing = Producer(queue.storage, journal, draw)
    for number in range(_SLEEPERS):
        plan = Plan(seconds=draw.uniform(0.2, LEASE), max_retries=1000, text=str(number))
        await producing.enqueue(f"{journal.by}.{number:06}", plan)
    await queue.close()


async def stall_detector(_: Store, journal: Journal, __: random.Random) -> None:
    """Record when this machine is too busy to run processes in time."""
    stop = _stop_on_term()
    while not stop.is_set():
        began = journal.now()
        await asyncio.sleep(_BEAT)
        late = journal.now() - began - _BEAT
        if late > _STALL:
            journal.note("stall", until=late, value="machine")


async def planner(
    store: Store, journal: Journal, _: random.Random, *, seconds: float, every: float = 0.25
) -> None:
    """Add two schedules that fire until shortly after the last fault."""
    queue = open_queue(store)
    await persist(queue.open)
    for schedule_id in (f"{journal.by}.s0", f"{journal.by}.s1"):
        start = queue.storage.clock.now() + timedelta(seconds=1)
        add = partial(
            queue.schedules.add,
            schedule_id,
            tick,
            interval=timedelta(seconds=every),
            start=start,
            end=start + timedelta(seconds=seconds),
            missed="all",
            max_missed=100_000,
        )
        await persist(add)
        journal.note("placed", schedule_id, until=queue.storage.clock.now().timestamp())
    await queue.close()


async def create_store(store: Store, _: Journal, __: random.Random) -> None:
    """Create the store, and the table for the rows of tasks if it has transactions."""
    queue = open_queue(store)
    await persist(queue.open)
    await queue.close()
    if store.has_transactions:
        await task_writes.create(store)


async def waiter(store: Store, _: Journal, __: random.Random, *, seconds: float) -> None:
    """Return when the queue is drained; raise TimeoutError if that takes too long."""
    queue = open_queue(store)
    async with asyncio.timeout(seconds):
        await persist(queue.open)
        while True:
            with suppress(StorageError):
                stats = await queue.storage.stats()
                left = sum(n for status, n in stats.by_status.items() if not status.is_final)
                schedules = await queue.storage.list_schedules()
                if left == 0 and all(schedule.next_at is None for schedule in schedules):
                    break
            await asyncio.sleep(0.1)
    await queue.close()


async def reader(store: Store, journal: Journal, _: random.Random) -> None:
    """Record the contents of the store after the run."""
    queue = open_queue(store)
    await persist(queue.open)
    await read_store(queue.storage, journal)
    await queue.close()
    if store.has_transactions:
        for task_id, rows in (await task_writes.read(store)).items():
            journal.note("written", task_id, value=rows)


async def auditor(
    store: Store, journal: Journal, _: random.Random, *, every: float, keep: float
) -> None:
    """Record until SIGTERM every task that ends, before it is purged; purge dead letters after `keep`."""
    stop = _stop_on_term()
    queue = open_queue(store)
    await persist(queue.open)
    noted: set[str] = set()
    while not stop.is_set():
        with suppress(StorageError):
            noted = await audit(queue.storage, journal, noted)
            await queue.storage.purge_dead(queue.storage.clock.now() - timedelta(seconds=keep))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), every)
    with suppress(StorageError):
        await queue.close()


async def persist(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    while True:
        try:
            await call()
            return
        except StorageError:
            await asyncio.sleep(_RETRY)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a log, if it exists."""
    return path.read_text(errors="replace").splitlines() if path.exists() else []
