"""`omniq queues`, `omniq workers` and `omniq breakers`."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli import output
from omniq.cli.groups import list_group
from omniq.cli.options import Json, Url
from omniq.cli.parsing import relative_time
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.models import WorkerInfo
from omniq.operations.health import breakers_of, live_workers
from omniq.operations.overview import queue_summaries
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.process import console

app = list_group("queues", "List, pause and resume queues.")

Names = Annotated[list[str], typer.Argument(metavar="QUEUE", help="Names of queues.")]


@app.command("list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """List the queues that have tasks, are paused, or are named by a worker."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        lines = await queue_summaries(task_queue.storage)
        if as_json:
            for line in lines:
                output.print_json(line)
        elif lines:
            rows = [
                (
                    line.name,
                    line.waiting,
                    line.running,
                    output.text("paused", "yellow") if line.paused else output.text("open"),
                    output.text(line.workers, "" if line.workers else "red"),
                )
                for line in lines
            ]
            output.print_rich(
                output.Listing(("queue", ">waiting", ">running", "state", ">workers"), rows)
            )
        else:
            output.print_note("no queues: no task is waiting or running")

    with_queue(url, work)


@app.command()
def pause(names: Names, url: Url = None) -> None:
    """Pause queues: workers claim no tasks from them. Running tasks continue, and tasks can be enqueued."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        known = {line.name for line in await queue_summaries(task_queue.storage)}
        for name in names:
            await task_queue.storage.pause_queue(name)
            output.print_line(f"paused: {name}")
            if name not in known:
                output.print_note(f"{name}: no task and no worker names this queue now")

    with_queue(url, work, creates=True)


@app.command()
def resume(names: Names, url: Url = None) -> None:
    """Resume queues: workers claim tasks from them again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        paused = await task_queue.storage.paused_queues()
        for name in names:
            await task_queue.storage.resume_queue(name)
            output.print_line(f"resumed: {name}")
            if name not in paused:
                output.print_note(f"{name}: this queue was not paused")

    with_queue(url, work, creates=True)


workers = list_group("workers", "List, pause and resume workers.")

Workers = Annotated[list[str], typer.Argument(metavar="ID", help="Ids of workers.")]


@workers.command("list")
def list_workers(url: Url = None, as_json: Json = False) -> None:
    """List the live workers and how many tasks each runs."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await live_workers(task_queue.storage)
        if as_json:
            for worker in found:
                output.print_json(worker)
            return
        if not found:
            output.print_note("no worker is alive; start one: omniq worker MODULE")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                worker.id,
                f"{len(worker.running)}/{worker.concurrency or '?'}",
                _state(worker),
                f"{worker.host}:{worker.pid}",
                ", ".join(worker.queues) or "all",
                str(worker.runnable or "all"),
                relative_time(worker.last_heartbeat, now),
                relative_time(worker.started_at, now),
            )
            for worker in found
        ]
        columns = ("worker", ">busy", "state", "process", "queues", "runs", "heartbeat", "started")
        output.print_rich(output.Listing(columns, rows))

    with_queue(url, work)


def _state(worker: WorkerInfo) -> output.Cell:
    if worker.stalled:
        return output.text("stalled", "red")
    return output.text("paused", "yellow") if worker.paused else output.text("alive", "green")


@workers.command("pause")
def pause_workers(ids: Workers, url: Url = None) -> None:
    """Pause workers: they claim no more tasks; running tasks continue. A restarted worker is not paused."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for worker_id in ids:
            _check_alive(worker_id, await task_queue.storage.pause_worker(worker_id))
            output.print_line(f"paused: {worker_id}")

    with_queue(url, work)


@workers.command("resume")
def resume_workers(ids: Workers, url: Url = None) -> None:
    """Resume workers: they claim tasks again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for worker_id in ids:
            _check_alive(worker_id, await task_queue.storage.resume_worker(worker_id))
            output.print_line(f"resumed: {worker_id}")

    with_queue(url, work)


def _check_alive(worker_id: str, is_alive: bool) -> None:
    if not is_alive:
        raise CommandFailed(f"worker {worker_id}: none with that id is alive", console.NOT_FOUND)


def breakers(url: Url = None, as_json: Json = False) -> None:
    """List the circuit breakers that all workers share, each with its state, since when, and why."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await breakers_of(task_queue.storage)
        if as_json:
            for breaker in found:
                output.print_json(breaker)
            return
        if not found:
            output.print_note("no breaker has been used yet")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                breaker.name,
                output.text(breaker.state, "green" if breaker.state == "closed" else "red"),
                breaker.failures,
                relative_time(breaker.opened_at, now),
                breaker.reason,
                breaker.probe or "",
            )
            for breaker in found
        ]
        columns = ("breaker", "state", ">failures", "opened", "because of", "probed by")
        output.print_rich(output.Listing(columns, rows))

    with_queue(url, work)
