"""`python -m benchmarks.object_storage`: a queue on an S3 server, its rate and its requests.

python -m benchmarks.object_storage                         MiniStack as it is
python -m benchmarks.object_storage --server seaweed
python -m benchmarks.object_storage --put 35 --get 12       with the latency of S3 Standard, in milliseconds
python -m benchmarks.object_storage --workers 8 --tasks 20000

Prints tasks a second, the requests for 1,000 tasks, each worker's share, and the requests of an idle
worker. A proxy in front of the server adds the latency and counts the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from uuid import uuid4

from benchmarks.object_tasks import noop
from omniq import AsyncTaskQueue
from omniq.storage import open_storage
from omniq.testing.s3_servers import MiniStackServer, S3Server, SeaweedServer

_METHOD = re.compile(rb"^(PUT|GET|HEAD|POST|DELETE) ", re.MULTILINE)


class DelayingProxy:
    """Forwards requests to a server after the latency of their method, and counts them."""

    def __init__(self, port: int, put: float, get: float) -> None:
        self._server_port = port
        self._delays = {b"PUT": put, b"POST": put}
        self._get = get
        self.counts: Counter[str] = Counter()

    async def start(self) -> int:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        # Cancelled at the end of the run, with connections open.
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                self._forward(reader, far_writer, counts=True),
                self._forward(far_reader, writer, counts=False),
            )

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        while data := await reader.read(1 << 18):
            # A client sends a request when it has the answer to the last: each begins with a read.
            found = _METHOD.match(data) if counts else None
            if found:
                self.counts[found[1].decode()] += 1
                delay = self._delays.get(found[1], self._get)
                if delay:
                    await asyncio.sleep(delay)
            writer.write(data)
        writer.close()


async def _enqueue(url: str, tasks: int) -> float:
    began = time.monotonic()
    async with AsyncTaskQueue(url) as queue:
        for start in range(0, tasks, 1_000):
            await queue.enqueue_many(noop, [(n,) for n in range(start, start + 1_000)])
    return time.monotonic() - began


def _start(url: str, options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "omniq", "worker", "benchmarks.object_tasks", "--url", url]
    command += ["--concurrency", str(options.concurrency), "--log-level", "warning"]
    return [subprocess.Popen(command) for _ in range(options.workers)]


async def _drain(url: str, options: argparse.Namespace) -> float:
    workers = _start(url, options)
    began = rated = 0.0
    try:
        async with open_storage(url) as storage:
            while True:
                waiting = await storage.count_waiting()
                # Counted from the first claim: starting Python takes longer than a small drain.
                if not began and waiting < options.tasks:
                    began, first = time.monotonic(), waiting
                if not waiting:
                    rated = first / (time.monotonic() - began)
                    break
                await asyncio.sleep(0.1)
    finally:
        await _stop(workers)
    return rated


async def measure(options: argparse.Namespace) -> None:
    kind: type[S3Server] = SeaweedServer if options.server == "seaweed" else MiniStackServer
    with kind() as server:
        os.environ.update(server.environment)
        proxy = DelayingProxy(server.port, options.put / 1000, options.get / 1000)
        port = await proxy.start()
        url = f"s3://omniq/{uuid4().hex}?endpoint=http://127.0.0.1:{port}"
        seconds = await _enqueue(url, options.tasks)
        print(f"enqueue  {options.tasks / seconds:,.0f}/s  {_per_thousand(proxy, options.tasks)}")
        proxy.counts.clear()
        rate = await _drain(url, options)
        print(f"drain    {rate:,.0f}/s  {_per_thousand(proxy, options.tasks)}")
        proxy.counts.clear()
        await _idle(url, options)
        print(f"idle     {dict(proxy.counts)} in {options.idle} s, for {options.workers} workers")


async def _idle(url: str, options: argparse.Namespace) -> None:
    workers = _start(url, options)
    await asyncio.sleep(options.idle)
    await _stop(workers)


async def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        await asyncio.to_thread(worker.wait)


def _per_thousand(proxy: DelayingProxy, tasks: int) -> str:
    parts = [f"{count * 1000 / tasks:.1f} {name}" for name, count in sorted(proxy.counts.items())]
    return f"for 1,000 tasks: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.object_storage")
    parser.add_argument("--server", choices=("ministack", "seaweed"), default="ministack")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--put", type=float, default=0, help="milliseconds")
    parser.add_argument("--get", type=float, default=0, help="milliseconds")
    parser.add_argument("--idle", type=float, default=20, help="seconds")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
