"""`python -m benchmarks.fleet`: what hundreds of worker processes ask of one server.

python -m benchmarks.fleet                                   200 workers on PostgreSQL, then on Redis
python -m benchmarks.fleet --backend redis --workers 50

The workers are forked by a process that has all imports, and have default settings. In each part the
server's own counters are read:

- idle: commands and connections of all workers together, while nothing waits;
- wake: one task is enqueued. How many commands follow within a second, beyond those of an idle fleet, and
  how long it takes until the task starts;
- drain: many tasks, each of which must run once;
- outage: the server is killed, and started again after three seconds; many tasks again;
- stop: SIGTERM for all workers.

Exits with 1 if a task did not run, or a worker ended with another code than 0.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import importlib
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, cast

from omniq import AsyncTaskQueue, AsyncWorkerPool, task
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.testing.servers import PostgresServer, RedisServer, Server

_STARTED = "FLEET_STARTED"
_PATIENCE = 180.0
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


@task
async def note(number: int) -> None:
    """Write that the task started: a short line is appended as a whole."""
    file = os.open(os.environ[_STARTED], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, f"{number} {time.monotonic()}\n".encode())
    finally:
        os.close(file)


def main() -> int:
    options = _parse()
    is_good = True
    for backend in options.backend or ("postgres", "redis"):
        importlib.import_module(f"omniq.storage.{backend}")
        with tempfile.TemporaryDirectory(prefix="omniq-fleet-") as folder:
            started = Path(folder, "started")
            started.touch()
            os.environ[_STARTED] = str(started)
            with _server(backend) as server:
                is_good = Fleet(backend, server, started, options).run() and is_good
    return int(not is_good)


class Fleet:
    """The workers of one server."""

    def __init__(
        self, backend: str, server: Server, started: Path, options: argparse.Namespace
    ) -> None:
        self._backend, self._server, self._started = backend, server, started
        self._workers: int = options.workers
        self._tasks: int = options.tasks
        self._seconds: float = options.seconds
        self._next = 0

    def run(self) -> bool:
        """Run all parts and print their figures; returns whether each task ran and each worker ended well."""
        gc.freeze()
        asyncio.run(self._prepare())
        began = time.monotonic()
        pids = [_fork(self._server.url) for _ in range(self._workers)]
        try:
            return asyncio.run(self._measure(pids, began))
        finally:
            for pid in pids:
                _end(pid)

    async def _prepare(self) -> None:
        async with AsyncTaskQueue(self._server.url):
            pass

    async def _measure(self, pids: list[int], began: float) -> bool:
        async with (
            AsyncTaskQueue(self._server.url) as queue,
            _Counters(self._backend, self._server.url) as counters,
        ):
            await self._until(lambda: self._are_up(queue))
            self._print(f"{len(pids)} workers up after {time.monotonic() - began:.1f} s")
            await asyncio.sleep(15)
            rate = await self._idle(counters)
            await self._wake(queue, counters, rate)
            is_good = await self._drain(queue, "drain")
        self._server.kill()
        await asyncio.sleep(3)
        self._server.restart()
        async with AsyncTaskQueue(self._server.url) as queue:
            is_good = await self._drain(queue, "after the outage") and is_good
        return self._stop(pids) and is_good

    async def _idle(self, counters: _Counters) -> float:
        before = await counters.commands()
        await asyncio.sleep(self._seconds)
        rate = (await counters.commands() - before) / self._seconds
        connections = await counters.connections()
        self._print(f"idle: {rate:.0f} commands/s of all, {connections} connections")
        return rate

    async def _wake(self, queue: AsyncTaskQueue, counters: _Counters, rate: float) -> None:
        extra, waits = [], []
        for _ in range(9):
            before, asked = await counters.commands(), time.monotonic()
            (number,) = await self._enqueue(queue, 1)
            await self._until(lambda number=number: self._have_started({number}))  # type: ignore[misc]
            waits.append(self._starts()[number][0] - asked)
            await asyncio.sleep(max(0.0, asked + 1 - time.monotonic()))
            seconds = time.monotonic() - asked
            extra.append(await counters.commands() - before - rate * seconds)
        self._print(
            f"wake: {statistics.median(extra):.0f} commands beyond those of an idle fleet within a second of one "
            f"enqueue; the task starts after {1000 * statistics.median(waits):.1f} ms"
        )

    async def _drain(self, queue: AsyncTaskQueue, name: str) -> bool:
        began = time.monotonic()
        numbers = set(await self._enqueue(queue, self._tasks))
        await self._until(lambda: self._have_started(numbers))
        starts = self._starts()
        last = max(starts[number][-1] for number in numbers)
        runs = Counter(len(starts[number]) for number in numbers)
        repeated = sum(runs.values()) - runs[1]
        self._print(
            f"{name}: {len(numbers)} tasks enqueued and started in {last - began:.1f} s, {repeated} ran more than once"
        )
        return not repeated

    def _stop(self, pids: list[int]) -> bool:
        began = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        codes = Counter(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
        pids.clear()
        self._print(
            f"stop: all ended {time.monotonic() - began:.1f} s after SIGTERM, exit codes {dict(codes)}"
        )
        return all(code == 0 for code in codes)

    async def _enqueue(self, queue: AsyncTaskQueue, count: int) -> list[int]:
        numbers = list(range(self._next, self._next + count))
        self._next += count
        await queue.enqueue_many(note, numbers)
        return numbers

    async def _are_up(self, queue: AsyncTaskQueue) -> bool:
        return len(await queue.workers()) >= self._workers

    async def _have_started(self, numbers: set[int]) -> bool:
        return numbers <= self._starts().keys()

    def _starts(self) -> dict[int, list[float]]:
        starts: dict[int, list[float]] = {}
        for line in self._started.read_text().splitlines():
            number, at = line.split()
            starts.setdefault(int(number), []).append(float(at))
        return starts

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not await condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._backend}: no progress within {_PATIENCE:g} s")
            await asyncio.sleep(0.05)

    def _print(self, text: str) -> None:
        print(f"{self._backend}: {text}", flush=True)


class _Counters:
    """What the server says of its clients."""

    def __init__(self, backend: str, url: str) -> None:
        self._is_postgres, self._url = backend == "postgres", url

    async def __aenter__(self) -> _Counters:
        if self._is_postgres:
            import asyncpg

            self._connection = await asyncpg.connect(self._url)
        else:
            import redis.asyncio

            self._connection = redis.asyncio.from_url(self._url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await (self._connection.close() if self._is_postgres else self._connection.aclose())

    async def commands(self) -> int:
        """Transactions of PostgreSQL, commands of Redis outside of scripts, without those that ask here."""
        if self._is_postgres:
            # The figures of other sessions are at most a second old.
            await self._connection.execute("SELECT pg_stat_clear_snapshot()")
            sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
            return cast(int, await self._connection.fetchval(sql))
        # Those within scripts are not sent by clients.
        stats = await self._connection.info("commandstats")
        sent = ("cmdstat_eval", "cmdstat_evalsha", "cmdstat_ping")
        return sum(stats[name]["calls"] for name in sent if name in stats)

    async def connections(self) -> int:
        if self._is_postgres:
            sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            return cast(int, await self._connection.fetchval(sql))
        return cast(int, (await self._connection.info("clients"))["connected_clients"])


def _server(backend: str) -> Server:
    if backend == "postgres":
        return PostgresServer(durable=True, options={"max_connections": "1000"})
    return RedisServer(durable=True, options={"maxclients": "5000"})


def _fork(url: str) -> int:
    pid = os.fork()
    if pid == 0:
        _be_a_worker(url)
    return pid


def _be_a_worker(url: str) -> NoReturn:
    status = 1
    # It dies when this program is killed.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        asyncio.run(_work(url))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


async def _work(url: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = Settings()
    storage = open_storage(url, settings=settings)
    async with AsyncWorkerPool(storage, 10, settings.poll_interval):
        await stop.wait()


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet")
    parser.add_argument("--backend", action="append", choices=("postgres", "redis"))
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=4_000)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long the idle fleet is watched"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
