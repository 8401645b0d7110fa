"""How long every page of the dashboard takes over a large store. Prints a table, worst first.

Fills a store through the storage contract, with a clock that moves through the last week: six in ten
tasks have ended (most succeeded, some were cancelled, a few are dead letters), the others wait in many
queues; a few run. Then requests every page, every filter and every route of the API: once in a
dashboard that was just started, and several times later, each more than a second after the last, so
that no answer comes from a cache. Meanwhile another process enqueues and runs 20 tasks a second. `CPU` is
that of the process of the dashboard, which also renders the page.

    python -m benchmarks.dashboard_pages [--backend sqlite] [--tasks 1000000] [--rounds 5]
    python -m benchmarks.dashboard_pages --url URL      # fills it only if it is empty

PostgreSQL and Redis servers are started unless a URL is given.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import asyncpg
import httpx

from omniq import AsyncTaskQueue, task
from omniq.dashboard import Access, create_app
from omniq.models import Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import Cancelled, Failed, Outcome, Retried, Succeeded
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts
from omniq.storage.urls import open_storage
from omniq.testing.clock import ManualClock
from omniq.testing.servers import PostgresServer, RedisServer

SECRET = "secret-of-the-benchmark"
BATCH = 1_000
TASKS_PER_SECOND = 20
HISTORY_FUNCTIONS = 50
AGE = timedelta(days=7)
RESULT_TTL = 30 * 86_400.0
RUNNING = 8
ERRORS = [f"{name} was refused" for name in "abcdefghi"]
RARE = ("rare", "shop.rare", "tenant=rare")
"""A queue, a function and metadata that five of the oldest tasks have."""


@contextmanager
def empty_store(backend: str) -> Iterator[str]:
    """Yield the URL of an empty store of that kind."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if backend == "postgres":
            yield stack.enter_context(PostgresServer()).url
        elif backend == "redis":
            yield stack.enter_context(RedisServer()).url
        elif backend == "file":
            yield f"file://{folder}/store?durability=os"
        else:
            yield f"sqlite:///{folder}/store.db?durability=os"


# Filling


async def fill(url: str, total: int) -> None:
    """Fill the store as a week of work would."""
    clock = ManualClock(datetime.now(UTC) - AGE, seed=1)
    async with open_storage(url, settings=Settings(result_ttl=RESULT_TTL), clock=clock) as storage:
        step = AGE / (total / BATCH + 2)
        ended = total // BATCH * 6 // 10 * BATCH
        for start in range(0, total, BATCH):
            clock.advance(step)
            numbers = range(start, min(start + BATCH, total))
            await storage.enqueue_many([task_of(clock, each, each < ended) for each in numbers])
            if start < ended:
                await finish(storage, start)
            elif (start - ended) // BATCH % 100 == 0:
                await fail_some(storage)


def task_of(clock: ManualClock, number: int, ends: bool) -> Task:
    is_rare = number < 5
    queue = "default" if ends or number % 4 else f"queue-{number // 4 % 40}"
    delay = timedelta(hours=1) if not ends and number % 3 == 0 else None
    return Task(
        id=clock.new_id(),
        func_path=RARE[1] if is_rare else f"shop.work_{number % 7}",
        args=(number, f"customer{number}@example.org"),
        queue=RARE[0] if is_rare else queue,
        eta=None if delay is None else datetime.now(UTC) + delay,
        metadata={"tenant": "rare" if is_rare else f"t{number % 100}"},
    )


async def finish(storage: BaseStorage, start: int) -> None:
    claimed = await storage.reserve(BATCH)
    await storage.record([outcome_of(storage, task, start + n) for n, task in enumerate(claimed)])


def outcome_of(storage: BaseStorage, task: Task, number: int) -> Outcome:
    if number % 60 == 0:
        error = TaskError(ERRORS[number // 60 % 9], error_type="CardError", traceback="Traceback …")
        return Failed(task.id, task.token, error, "exhausted" if number % 120 else "permanent")
    if number % 97 == 0:
        return Cancelled(task.id, task.token, "by request")
    now = storage.clock.now()
    result = TaskResult(
        task_id=task.id,
        status=TaskStatus.SUCCESS,
        result=number,
        attempts=1,
        started_at=now,
        finished_at=now,
    )
    return Succeeded(task.id, task.token, result)


async def fail_some(storage: BaseStorage) -> None:
    """Fail some tasks, which will be retried in an hour."""
    claimed = await storage.reserve(BATCH // 2)
    error = TaskError("timed out", error_type="TimeoutError")
    later = datetime.now(UTC) + timedelta(hours=1)
    await storage.record([Retried(task.id, task.token, error, later) for task in claimed])


async def fill_history(url: str) -> None:
    """Store three days of runs by the minute, of 50 functions in ten queues."""
    async with open_storage(url) as storage:
        now = int(storage.clock.now().timestamp()) // 60 * 60
        lines = [
            FunctionCounts(
                f"shop.work_{number}", f"queue-{number % 10}", RunCounts(9, 0, 1, 0, 3.0, [9], [10])
            )
            for number in range(HISTORY_FUNCTIONS)
        ]
        total = RunCounts(450, 0, 50, 0, 150.0, [450], [500])
        starts = range(now - 3 * 86_400, now - 300, 60)
        for first in range(0, len(starts), 200):
            minutes = [PeriodCounts(each, total, lines) for each in starts[first : first + 200]]
            await storage.add_run_counts(minutes)
        while await storage.merge_run_counts():
            pass


# Requests


async def pages_of(storage: BaseStorage) -> list[str]:
    """Return the path of every page and route, with ids that exist."""
    tasks = ["/tasks", *(f"/tasks?status={status}" for status in TaskStatus)]
    tasks += ["/tasks?queue=default", "/tasks?queue=queue-7", f"/tasks?queue={RARE[0]}"]
    tasks += ["/tasks?function=shop.work_3", f"/tasks?function={RARE[1]}"]
    tasks += ["/tasks?function=shop.unknown", "/tasks?queue=unknown&status=failed"]
    tasks += [f"/tasks?since={span}" for span in ("15m", "24h", "7d")]
    tasks += ["/tasks?until=3d", "/tasks?since=5d&until=4d&status=cancelled"]
    tasks += ["/tasks?metadata=tenant%3Dt7", "/tasks?metadata=tenant%3Drare"]
    tasks += ["/tasks?status=failed&queue=default", "/tasks?status=pending&function=shop.work_1"]
    newest = (await storage.list_tasks(limit=1))[0].id
    tasks += [f"/tasks?id={newest[:4]}", f"/tasks?id={newest[:12]}", f"/tasks?id={newest}"]
    tasks += ["/tasks?limit=500", "/tasks?status=success&limit=500"]
    tasks += [f"/tasks?q={text}" for text in ("fn:work_3", "customer77", "error:refused", "zzzz")]
    tasks += ["/tasks?q=arg.0:999990", "/tasks?q=meta.tenant:rare", "/tasks?q=error:zzzz"]
    single = [
        f"/tasks/{(await storage.list_tasks(status=status, limit=1))[0].id}"
        for status in TaskStatus
    ]
    dead_letters = ["/dead", "/dead?reason=permanent", "/dead?function=shop.work_2"]
    dead_letters += ["/dead?error=zzzz", "/dead?sort=count"]
    (worker, *_) = await storage.workers()
    html = [f"/?range={span}" for span in ("24h", "30d")]
    html += [f"/functions?range={span}" for span in ("1h", "24h", "30d")]
    html += ["/functions/shop.work_3?range=24h", "/queues/queue-7", "/queues/default?range=24h"]
    html += [f"/workers/{worker.id}", "/audit", "/jobs", "/tasks/new", "/schedules/new"]
    others = ["/workers", "/schedules", "/queues", "/limits", "/flows", "/events"]
    requested = [*tasks, *single, *dead_letters, *others]
    more = [f"{page}/explanation" for page in single] + ["/dead/groups", "/overview", "/breakers"]
    api = [f"/api{page}" for page in (*requested, *more, "/storage")]
    return ["/", *html, *requested, "/storage", "/api", *api]


@asynccontextmanager
async def dashboard(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Open a dashboard that was just started."""
    async with AsyncTaskQueue(url) as queue:
        app = create_app(queue, access=Access(operator=SECRET))
        headers = {"authorization": f"Bearer {SECRET}"}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers, timeout=60
        ) as client:
            try:
                client.dashboard = app.state.dashboard  # type: ignore[attr-defined]
                yield client
            finally:
                await app.state.dashboard.sampler.close()


class Time(NamedTuple):
    """Milliseconds until the page is complete, and of CPU."""

    wall: float
    cpu: float


async def timed(client: httpx.AsyncClient, page: str) -> Time:
    """Request the page."""
    began, cpu = time.perf_counter(), time.process_time()
    answer = await client.get(page)
    taken = Time((time.perf_counter() - began) * 1000, (time.process_time() - cpu) * 1000)
    assert answer.status_code == 200, (page, answer.status_code, answer.text)
    return taken


async def first_event(client: httpx.AsyncClient) -> Time:
    """Wait for the first event of the live stream."""
    began, cpu = time.perf_counter(), time.process_time()
    stream = client.dashboard.sampler.watch()  # type: ignore[attr-defined]
    await anext(stream)
    taken = Time((time.perf_counter() - began) * 1000, (time.process_time() - cpu) * 1000)
    await stream.aclose()
    return taken


async def page_backwards(client: httpx.AsyncClient, count: int = 20) -> list[Time]:
    """Request one page after the other, from the newest backwards."""
    taken, cursor = [], ""
    for _ in range(count):
        page = f"/api/tasks?limit=500&cursor={cursor}"
        taken.append(await timed(client, page))
        cursor = (await client.get(page)).json()["cursor"]
    return taken


async def measure(url: str, rounds: int) -> None:
    async with open_storage(url) as storage:
        pages = await pages_of(storage)
        first: dict[str, Time] = {}
        for page in pages:
            async with dashboard(url) as client:
                first[page] = await timed(client, page)
        async with dashboard(url) as client:
            first["(first event of the live stream)"] = await first_event(client)
            later: dict[str, list[Time]] = {page: [] for page in pages}
            for _ in range(rounds):
                for page in pages:
                    later[page].append(await timed(client, page))
                await asyncio.sleep(1.1)
            later["(twenty pages of 500, one after the other)"] = await page_backwards(client)
    report(first, later)


def report(first: dict[str, Time], later: dict[str, list[Time]]) -> None:
    p95 = {page: percentile_95([each.wall for each in taken]) for page, taken in later.items()}
    print(f"{'first ms':>9} {'median':>8} {'p95':>8} {'CPU':>8}  page")
    for page in sorted({**first, **later}, key=lambda each: p95.get(each, 0.0), reverse=True):
        taken = later.get(page) or [first[page]]
        median = statistics.median(each.wall for each in taken)
        cpu = statistics.median(each.cpu for each in taken)
        opened = first[page].wall if page in first else 0.0
        print(f"{opened:9.1f} {median:8.1f} {p95.get(page, 0.0):8.1f} {cpu:8.1f}  {page}")
    slow = [page for page, each in p95.items() if each > 150]
    print(f"{len(slow)} of {len(p95)} with a p95 above 150 ms")


def percentile_95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]


async def prepare(url: str, total: int) -> None:
    async with open_storage(url) as storage:
        is_filled = bool(await storage.list_tasks(limit=1))
    if not is_filled:
        began = time.perf_counter()
        await fill(url, total)
        await finish_background_work(url)
        await fill_history(url)
        print(f"filled with {total:,} tasks in {time.perf_counter() - began:.0f} s")


async def finish_background_work(url: str) -> None:
    """Do what a server does in the background within a minute: here a week took a minute."""
    if url.startswith("postgres"):
        connection = await asyncpg.connect(url)
        await connection.execute("VACUUM (ANALYZE)")
        await connection.execute("CHECKPOINT")
        await connection.close()


async def run(url: str, total: int, rounds: int) -> None:
    await prepare(url, total)
    # A worker with running tasks, during the whole measurement.
    async with open_storage(url) as worker:
        await worker.renew(lease=3600, concurrency=RUNNING)
        await worker.reserve(RUNNING)
        with load(url):
            await measure(url, rounds)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Enqueue and run 20 tasks a second in another process."""
    command = [sys.executable, "-m", "benchmarks.dashboard_pages", "--work", "--url", url]
    with subprocess.Popen(command) as working:
        try:
            yield
        finally:
            working.terminate()


@task
async def small(number: int) -> int:
    """A task of the load."""
    return number


async def work(url: str) -> None:
    """Enqueue and run 20 tasks a second until the process is terminated."""
    async with AsyncTaskQueue(url) as queue, queue.worker(concurrency=4, queues=["load"]):
        for number in itertools.count():
            await queue.options(queue="load").enqueue(small, number)
            await asyncio.sleep(1 / TASKS_PER_SECOND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("sqlite", "postgres", "redis", "file"))
    parser.add_argument("--url")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--work", action="store_true", help="only enqueue and run tasks")
    given = parser.parse_args()
    if given.work:
        asyncio.run(work(given.url))
        return
    if given.url:
        asyncio.run(run(given.url, given.tasks, given.rounds))
        return
    for backend in [given.backend] if given.backend else ["sqlite", "postgres"]:
        with empty_store(backend) as url:
            print(f"\n{backend}")
            asyncio.run(run(url, given.tasks, given.rounds))


if __name__ == "__main__":
    main()
