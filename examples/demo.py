"""Three hundred thumbnails, three workers, one of them killed on the way: nothing is lost.

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
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from omniq import AsyncTaskQueue, Settings, TaskError, TaskResult, TaskStatus, task
from omniq.functions import resolve
from omniq.outcomes import Outcome, Retried, Succeeded
from omniq.storage import open_storage

PICTURES = 300
WORKERS = 3
LEASE = 1.0


@task(max_retries=5)
def thumbnail(picture: int, size: tuple[int, int]) -> str:
    """Some honest work; every tenth picture is broken the first time it is looked at."""
    digest = hashlib.sha256(f"{picture}:{size}".encode())
    for _ in range(20_000):
        digest.update(digest.digest())
    return digest.hexdigest()


async def work(url: str) -> None:
    """A worker at its barest: claim a batch, run it, record it, recover what others dropped."""
    function = resolve("demo.thumbnail", allow=["demo"])
    async with open_storage(url, settings=Settings(lease=LEASE)) as storage:
        outcomes: list[Outcome] = []
        while True:
            await storage.renew(concurrency=8)
            await storage.give_back_abandoned()
            _, claimed = await storage.record_and_reserve(outcomes, 8)
            outcomes = []
            if not claimed:
                await storage.wait_for_work(0.1)
            for each in claimed:
                if each.args[0] % 10 == 0 and each.attempts == 0:
                    soon = storage.clock.now() + timedelta(milliseconds=200)
                    outcomes.append(
                        Retried(each.id, each.token, TaskError("not readable yet"), soon)
                    )
                    continue
                value = function(*each.args, **each.kwargs)
                result = TaskResult(
                    task_id=each.id,
                    status=TaskStatus.SUCCESS,
                    result=value,
                    attempts=each.attempts + 1,
                )
                outcomes.append(Succeeded(each.id, each.token, result))


def start_worker(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--worker", url])


async def show(url: str, console: Console) -> bool:
    started = time.perf_counter()
    async with AsyncTaskQueue(url) as queue:
        handles = await queue.enqueue_many(
            [(thumbnail, (picture, (320, 240))) for picture in range(PICTURES)]
        )
        console.print(f"{len(handles)} tasks are safe on disk. Starting {WORKERS} workers.")
        workers = [start_worker(url) for _ in range(WORKERS)]
        killed = ""
        try:
            with Live(console=console, refresh_per_second=10) as live:
                while True:
                    stats = await queue.stats()
                    done = stats.by_status[TaskStatus.SUCCESS]
                    live.update(progress(stats.by_status, await queue.workers(), killed))
                    if not killed and done > PICTURES // 4:
                        killed = await kill_a_busy_one(queue, workers)
                    if done == PICTURES:
                        break
                    await asyncio.sleep(0.05)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        results = [await queue.get_result(handle.id) for handle in handles]
    return report(results, killed, time.perf_counter() - started, console)


async def kill_a_busy_one(queue: AsyncTaskQueue, workers: list[subprocess.Popen[bytes]]) -> str:
    busy = [info for info in await queue.workers() if info.running]
    if not busy:
        return ""
    victim = busy[0]
    os.kill(victim.pid, signal.SIGKILL)
    workers[:] = [worker for worker in workers if worker.pid != victim.pid or worker.wait() == 0]
    return f"worker {victim.pid} was killed (SIGKILL) while it held {len(victim.running)} tasks"


def progress(by_status: dict[TaskStatus, int], workers: list, killed: str) -> Table:  # type: ignore[type-arg]
    table = Table.grid(padding=(0, 2))
    done = by_status[TaskStatus.SUCCESS]
    bar = "█" * (done * 40 // PICTURES)
    table.add_row("done", f"[green]{bar:<40}[/] {done}/{PICTURES}")
    for status in (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING):
        table.add_row(str(status), str(by_status[status]))
    table.add_row("workers", ", ".join(f"{info.pid} ({len(info.running)})" for info in workers))
    table.add_row("", f"[bold red]{killed}[/]")
    return table


def report(results: list[TaskResult | None], killed: str, seconds: float, console: Console) -> bool:
    correct = sum(
        result is not None and result.result == thumbnail(picture, (320, 240))
        for picture, result in enumerate(results)
        if picture % 25 == 0
    )
    runs = Counter(result.attempts for result in results if result is not None)
    table = Table(title="What became of every task", title_justify="left")
    table.add_column("")
    table.add_column("tasks", justify="right")
    table.add_row("enqueued", str(PICTURES))
    table.add_row("finished", str(sum(runs.values())))
    for count, tasks in sorted(runs.items()):
        table.add_row(f"… in run {count}", str(tasks))
    table.add_row("[bold]lost[/]", f"[bold green]{results.count(None)}[/]")
    console.print(table)
    console.print(f"{killed or 'nobody was killed: all was done too soon'}.")
    console.print(f"{seconds:.1f} s in all; spot check of results: {correct} of {correct} right.")
    return results.count(None) == 0 and correct == len(range(0, PICTURES, 25))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        asyncio.run(work(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory(prefix="omniq-demo-") as folder:
        if not asyncio.run(show(f"sqlite:///{Path(folder, 'demo.db')}", Console())):
            sys.exit("the demo did not end as it should")


if __name__ == "__main__":
    main()
