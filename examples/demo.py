"""Three hundred pictures, three workers, one of them killed on the way: nothing is lost.

Enqueues real work on SQLite in a temporary folder, starts three worker processes, sends SIGKILL to
one of them while it holds tasks, and shows how the others take over when its lease ends. Leaves
nothing behind.

    python examples/demo.py
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from omniq import (
    AsyncTaskQueue,
    TaskContext,
    TaskResult,
    TaskStatus,
    TransientError,
    WorkerInfo,
    task,
)

PICTURES = 300
WORKERS = 3
LEASE = 1.5
SIZE = (320, 240)


@task(max_retries=5)
def thumbnail(ctx: TaskContext, picture: int, size: tuple[int, int]) -> str:
    """Some honest work; every tenth picture is not readable the first time."""
    if picture % 10 == 0 and ctx.attempt == 1:
        raise TransientError("the picture is still being uploaded", retry_after=0.5)
    return checksum(picture, size)


def checksum(picture: int, size: tuple[int, int]) -> str:
    digest = hashlib.sha256(f"{picture}:{size}".encode())
    for _ in range(30_000):
        digest.update(digest.digest())
    return digest.hexdigest()


async def work(url: str) -> None:
    async with (
        AsyncTaskQueue(url) as queue,
        queue.worker(concurrency=8, lease=LEASE, poll_interval=0.2, base_retry_delay=0.2),
    ):
        await asyncio.Event().wait()


def start_worker(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--worker", url])


async def show(url: str, console: Console) -> bool:
    began = time.perf_counter()
    async with AsyncTaskQueue(url) as queue:
        handles = await queue.enqueue_many(
            thumbnail, [(number, SIZE) for number in range(PICTURES)]
        )
        console.print(f"{len(handles)} tasks are safe on disk. Starting {WORKERS} workers.")
        workers = {worker.pid: worker for worker in (start_worker(url) for _ in range(WORKERS))}
        try:
            killed = await watch(queue, workers, console)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
        results = [await queue.get_result(handle.id) for handle in handles]
    return report(results, killed, time.perf_counter() - began, console)


async def watch(
    queue: AsyncTaskQueue, workers: dict[int, subprocess.Popen[bytes]], console: Console
) -> str:
    killed = ""
    with Live(console=console, refresh_per_second=10) as live:
        while True:
            stats, alive = await queue.stats(), await queue.workers()
            done = stats.by_status[TaskStatus.SUCCESS]
            live.update(progress(stats.by_status, alive, killed))
            busy = [info for info in alive if info.running and info.pid in workers]
            if not killed and busy and done > PICTURES // 4:
                os.kill(busy[0].pid, signal.SIGKILL)
                workers.pop(busy[0].pid).wait()
                killed = (
                    f"worker {busy[0].pid} got SIGKILL while it held {len(busy[0].running)} tasks"
                )
            if done == PICTURES:
                return killed
            await asyncio.sleep(0.05)


def progress(by_status: dict[TaskStatus, int], workers: list[WorkerInfo], killed: str) -> Table:
    table = Table.grid(padding=(0, 2))
    done = by_status[TaskStatus.SUCCESS]
    table.add_row("done", f"[green]{'█' * (done * 40 // PICTURES):<40}[/] {done}/{PICTURES}")
    for status in (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING):
        table.add_row(str(status), str(by_status[status]))
    table.add_row("workers", ", ".join(f"{info.pid} ({len(info.running)})" for info in workers))
    table.add_row("", f"[bold red]{killed}[/]")
    return table


def report(results: list[TaskResult | None], killed: str, seconds: float, console: Console) -> bool:
    sample = range(0, PICTURES, 20)
    right = sum(
        result is not None and result.result == checksum(number, SIZE)
        for number, result in enumerate(results)
        if number in sample
    )
    lost = results.count(None)
    runs = Counter(result.attempts for result in results if result is not None)
    table = Table(title="What became of every task", title_justify="left")
    table.add_column("")
    table.add_column("tasks", justify="right")
    table.add_row("enqueued", str(PICTURES))
    for count, tasks in sorted(runs.items()):
        table.add_row(f"finished in run {count}", str(tasks))
    table.add_row("[bold]lost[/]", f"[bold {'red' if lost else 'green'}]{lost}[/]")
    console.print(table)
    console.print(f"{killed or 'nobody was killed: all was done too soon'}; its tasks ran again.")
    console.print(f"{right} of {len(sample)} results checked are right. {seconds:.1f} s in all.")
    return not lost and right == len(sample)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        asyncio.run(work(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory(prefix="omniq-demo-") as folder:
        if not asyncio.run(show(f"sqlite:///{Path(folder, 'demo.db')}", Console())):
            sys.exit("the demo did not end as it should")


if __name__ == "__main__":
    main()
