"""`omniq workers`: list, pause, resume, stop, resize and ping workers, and list what they can run."""

from __future__ import annotations

import asyncio
from typing import Annotated

from omniq.cli import output
from omniq.cli.bulk import check_choice
from omniq.cli.command import Argument, Group, Option
from omniq.cli.options import Json, Url, Yes
from omniq.cli.parsing import count_of, format_duration, parse_duration, relative_time
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.models import Pong, WorkerInfo
from omniq.operations.health import live_workers
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.process import console

app = Group("workers", "List, pause, resume, stop and ping workers; list what they can run.")

Ids = Annotated[
    list[str],
    Argument(metavar="ID", help="Ids of workers, or their beginnings.", complete="worker"),
]

AnyIds = Annotated[
    list[str] | None,
    Argument(
        metavar="ID", help="Ids of workers, or their beginnings; all if none.", complete="worker"
    ),
]
Timeout = Annotated[
    str, Option("--timeout", metavar="SPAN", help="How long to wait for an answer.")
]


@app.command("list")
def list_(url: Url = None, as_json: Json = False) -> None:
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
                state_of(worker),
                f"{worker.host}:{worker.pid}",
                ", ".join(worker.queues) or "all",
                str(worker.runnable or "all"),
                relative_time(worker.last_heartbeat, now),
                relative_time(worker.started_at, now),
            )
            for worker in found
        ]
        columns = ("worker", ">busy", "state", "process", "queues", "runs", "heartbeat", "started")
        output.show(output.Listing(columns, rows))

    with_queue(url, work)


def state_of(worker: WorkerInfo) -> output.Cell:
    """The state of a worker, in one word."""
    if worker.stalled:
        return output.text("stalled", "red")
    if worker.stopping:
        return output.text("stopping", "yellow")
    return output.text("paused", "yellow") if worker.paused else output.text("alive", "green")


@app.command()
def pause(ids: Ids, url: Url = None, as_json: Json = False) -> None:
    """Pause workers: they claim no more tasks; running tasks continue. A restarted worker is not paused."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for worker_id in await _full_ids(task_queue, ids):
            _check_alive(worker_id, await task_queue.workers.pause(worker_id))
            output.print_pause("worker", worker_id, is_paused=True, as_json=as_json)

    with_queue(url, work)


@app.command()
def resume(ids: Ids, url: Url = None, as_json: Json = False) -> None:
    """Resume workers: they claim tasks again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for worker_id in await _full_ids(task_queue, ids):
            _check_alive(worker_id, await task_queue.workers.resume(worker_id))
            output.print_pause("worker", worker_id, is_paused=False, as_json=as_json)

    with_queue(url, work)


@app.command()
def stop(
    ids: Annotated[
        list[str] | None,
        Argument(metavar="ID", help="Ids of workers, or their beginnings.", complete="worker"),
    ] = None,
    url: Url = None,
    every: Annotated[bool, Option("--all", help="All live workers.")] = False,
    restart: Annotated[
        bool,
        Option(
            "--restart",
            help="Start a new process in place of each.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Ask workers to stop, as SIGTERM does: they claim no more tasks, and let running tasks finish.

    Workers read the request at their next heartbeat, within three seconds. The command does not wait until they have ended.
    """
    check_choice(ids, every, is_filtered=False)

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = await _chosen(task_queue, ids)
        if every:
            output.confirm(f"Stop {count_of(len(chosen), 'worker')}?", yes)
        for worker_id in chosen:
            _check_alive(worker_id, await task_queue.workers.stop(worker_id, restart=restart))
            if as_json:
                output.print_json({"worker": worker_id, "stopping": True})
            else:
                output.print_line(f"stopping: {worker_id}")

    with_queue(url, work)


@app.command()
def slots(
    worker: Annotated[
        str, Argument(metavar="ID", help="Id of a worker, or its beginning.", complete="worker")
    ],
    number: Annotated[int, Argument(metavar="N", help="How many tasks may run at a time.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change how many tasks one worker runs at a time, until it ends. It reads this at its next heartbeat."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        (worker_id,) = await _full_ids(task_queue, [worker])
        _check_alive(worker_id, await task_queue.workers.set_slots(worker_id, number))
        if as_json:
            output.print_json({"worker": worker_id, "slots": number})
        else:
            output.print_line(f"{worker_id}: {count_of(number, 'slot')} from its next heartbeat on")

    with_queue(url, work)


@app.command()
def ping(
    ids: AnyIds = None, url: Url = None, timeout: Timeout = "10s", as_json: Json = False
) -> None:
    """Check that workers answer. Fails if one does not answer in time.

    A worker answers at its next heartbeat, so an answer may take three seconds although the worker is idle.
    """

    async def work(task_queue: AsyncTaskQueue) -> None:
        silent = 0
        for worker_id, pong in await _pongs(task_queue, ids, timeout):
            silent += pong is None
            if as_json:
                seconds = None if pong is None else pong.seconds
                output.print_json({"worker": worker_id, "seconds": seconds})
            elif pong is None:
                output.print_line(f"{worker_id}: no answer")
            else:
                output.print_line(f"{worker_id}: answered in {format_duration(pong.seconds)}")
        if silent:
            raise CommandFailed(f"{count_of(silent, 'worker')} did not answer within {timeout}")

    with_queue(url, work)


@app.command()
def functions(
    ids: AnyIds = None, url: Url = None, timeout: Timeout = "10s", as_json: Json = False
) -> None:
    """List the functions that workers can run, by path, name and alias, as the workers report them."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await _pongs(task_queue, ids, timeout)
        runs: dict[str, list[str]] = {}
        for worker_id, pong in found:
            for function in () if pong is None else pong.functions:
                runs.setdefault(function, []).append(worker_id)
        if as_json:
            for function in sorted(runs):
                output.print_json({"function": function, "workers": runs[function]})
        elif runs:
            rows = [(name, len(runs[name]), ", ".join(runs[name])) for name in sorted(runs)]
            output.show(output.Listing(("function", ">workers", "worker"), rows))
        for worker_id, pong in found:
            if pong is None:
                output.print_note(f"{worker_id}: no answer within {timeout}")
            elif pong.more:
                output.print_note(f"{worker_id}: {pong.more:,} more, which it did not send")

    with_queue(url, work)


async def _pongs(
    task_queue: AsyncTaskQueue, ids: list[str] | None, timeout: str
) -> list[tuple[str, Pong | None]]:
    """The answers of the workers, all asked at the same time; None where one did not answer."""
    seconds = parse_duration("--timeout", timeout) or 0.0
    chosen = await _chosen(task_queue, ids)
    if not chosen:
        output.print_note("no worker is alive; start one: omniq worker MODULE")
    answers = await asyncio.gather(
        *(task_queue.workers.ping(worker_id, seconds) for worker_id in chosen)
    )
    return list(zip(chosen, answers, strict=True))


async def _chosen(task_queue: AsyncTaskQueue, ids: list[str] | None) -> list[str]:
    """The ids of the named workers, or of all. One that is not alive is an error."""
    alive = {worker.id for worker in await live_workers(task_queue.storage)}
    chosen = sorted(alive) if not ids else await _full_ids(task_queue, ids)
    for worker_id in chosen:
        _check_alive(worker_id, worker_id in alive)
    return chosen


async def _full_ids(task_queue: AsyncTaskQueue, texts: list[str]) -> list[str]:
    """The ids of live workers that these texts begin; a text that begins none is returned."""
    alive = [worker.id for worker in await live_workers(task_queue.storage)]
    chosen = []
    for text in texts:
        found = [text] if text in alive else [each for each in alive if each.startswith(text)]
        if len(found) > 1:
            raise CommandFailed(
                f"worker {text}: the beginning of several ids, such as {found[0]} and {found[1]}; "
                "give more characters",
                console.BAD_USAGE,
            )
        chosen += found or [text]
    return chosen


def _check_alive(worker_id: str, is_alive: bool) -> None:
    if not is_alive:
        raise CommandFailed(
            f"worker {worker_id}: no live worker has that id; see omniq workers", console.NOT_FOUND
        )
