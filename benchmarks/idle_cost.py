"""What does an idle worker cost its server, and how soon does it start what others enqueue?

For each server: the requests a second of `omniq worker` with nothing to do, at poll_interval=5 and
the default lease, counted on the wire by a proxy between the two (and, beside it, what the server
says it has done: transactions of PostgreSQL; commands of Redis, those inside scripts included).
Then the time from `enqueue` in another process to the start of the task, with the worker idle
before each. Prints numbers, and asserts nothing.

    python benchmarks/idle_cost.py [--backend postgres|redis] [--seconds 30] [--tasks 200]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

from omniq import AsyncTaskQueue
from omniq.testing.proxy import FaultProxy
from omniq.testing.servers import PostgresServer, RedisServer, Server

POLL_INTERVAL = "5"
WANTED_REQUESTS, WANTED_MILLISECONDS = 2, 20
SETTLING_SECONDS = 3


async def started() -> int:
    """The task: when it began, on a clock that all processes of this machine share."""
    return time.monotonic_ns()


async def work_done(server: Server) -> int:
    """What the server says it has done so far."""
    if isinstance(server, PostgresServer):
        import asyncpg

        connection = await asyncpg.connect(server.url)
        done = await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'"
        )
        await connection.close()
        return int(done)
    from redis.asyncio import Redis

    async with Redis.from_url(server.url) as client:
        return int((await client.info("stats"))["total_commands_processed"])


async def start_worker(url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omniq", "worker", Path(__file__).stem),
        *("--poll-interval", POLL_INTERVAL, "--concurrency", "10", "--log-level", "WARNING"),
        cwd=Path(__file__).parent,
        env={**os.environ, "OMNIQ_URL": url},
    )


async def idle_rates(server: Server, proxy: FaultProxy, seconds: float) -> tuple[float, float]:
    """Requests a second on the wire, and what the server counts."""
    before, requests = await work_done(server), proxy.counts.requests
    await asyncio.sleep(seconds)
    sent = proxy.counts.requests - requests
    return sent / seconds, (await work_done(server) - before) / seconds


async def start_latency(queue: AsyncTaskQueue, count: int) -> list[float]:
    """Milliseconds from enqueue to start, one task at a time."""
    latencies = []
    for _ in range(count):
        began = time.monotonic_ns()
        handle = await queue.enqueue(f"{Path(__file__).stem}.started")
        latencies.append((await handle.result(timeout=30) - began) / 1e6)
        await asyncio.sleep(0.05)
    return latencies


async def measure(backend: str, arguments: argparse.Namespace) -> None:
    with (PostgresServer if backend == "postgres" else RedisServer)() as server:
        async with FaultProxy(server.url) as proxy, AsyncTaskQueue(server.url) as queue:
            worker = await start_worker(proxy.url)
            try:
                await start_latency(queue, 1)
                await asyncio.sleep(SETTLING_SECONDS)
                requests, counted = await idle_rates(server, proxy, arguments.seconds)
                latencies = await start_latency(queue, arguments.tasks)
            finally:
                worker.terminate()
                await worker.wait()
    p50, p99 = statistics.median(latencies), statistics.quantiles(latencies, n=100)[98]
    print(
        f"{backend:8} {requests:>12.2f} {counted:>12.2f} {p50:>10.1f} {p99:>10.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", choices=["postgres", "redis"], action="append")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--tasks", type=int, default=200)
    arguments = parser.parse_args()
    print(
        f"an idle worker for {arguments.seconds:g} s at poll_interval={POLL_INTERVAL}, then "
        f"{arguments.tasks} tasks one by one; wanted: under {WANTED_REQUESTS} requests/s, "
        f"p50 under {WANTED_MILLISECONDS} ms"
    )
    print(f"{'backend':8} {'requests/s':>12} {'server/s':>12} {'p50 ms':>10} {'p99 ms':>10}")
    for backend in arguments.backend or ["postgres", "redis"]:
        asyncio.run(measure(backend, arguments))


if __name__ == "__main__":
    main()
