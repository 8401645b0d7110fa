"""`omniq queues`: list, pause, resume and purge queues."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from omniq.cli import output
from omniq.cli.bulk import DryRun, Words, change_all
from omniq.cli.command import Argument, Group
from omniq.cli.options import Json, PauseReason, PauseSpan, Url, Yes
from omniq.cli.parsing import parse_duration
from omniq.cli.queue_session import with_queue
from omniq.operations import bulk_actions
from omniq.operations.bulk_selection import Steps, can_be_changed, select_tasks
from omniq.operations.overview import queue_summaries
from omniq.operations.search_query import TaskSearch
from omniq.queue.async_queue import AsyncTaskQueue

app = Group("queues", "List, pause, resume and purge queues.")

_UNKNOWN = "no task and no worker names this queue now"

Names = Annotated[list[str], Argument(metavar="QUEUE", help="Names of queues.", complete="queue")]


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
            output.show(
                output.Listing(("queue", ">waiting", ">running", "state", ">workers"), rows)
            )
        else:
            output.print_note("no queues: no task is waiting or running")

    with_queue(url, work)


@app.command()
def pause(
    names: Names,
    url: Url = None,
    reason: PauseReason = "",
    span: PauseSpan = None,
    as_json: Json = False,
) -> None:
    """Pause queues: workers claim no tasks from them. Running tasks continue, and tasks can be enqueued."""
    until = parse_duration("--for", span)

    async def work(task_queue: AsyncTaskQueue) -> None:
        known = {line.name for line in await queue_summaries(task_queue.storage)}
        for name in names:
            await task_queue.queues.pause(name, reason=reason, until=until)
            output.print_pause("queue", name, is_paused=True, as_json=as_json)
            if name not in known and not as_json:
                output.print_note(f"{name}: {_UNKNOWN}")

    with_queue(url, work, creates=True)


@app.command()
def resume(names: Names, url: Url = None, as_json: Json = False) -> None:
    """Resume queues: workers claim tasks from them again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        paused = await task_queue.queues.paused()
        for name in names:
            await task_queue.queues.resume(name)
            output.print_pause("queue", name, is_paused=False, as_json=as_json)
            if name not in paused and not as_json:
                output.print_note(f"{name}: this queue was not paused")

    with_queue(url, work, creates=True)


@app.command()
def purge(
    names: Names,
    url: Url = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Cancel all waiting tasks of queues. Running tasks continue, and tasks can be enqueued meanwhile."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        known = {line.name for line in await queue_summaries(storage)}
        for name in names:
            if name not in known and not as_json:
                output.print_note(f"{name}: {_UNKNOWN}")

        async def waiting() -> Steps:
            for name in names:
                async for ids in select_tasks(storage, TaskSearch(queue=name), can_be_changed):
                    yield ids

        shown = ", ".join(names).replace("{", "{{").replace("}", "}}")
        words = Words(f"Cancel {{}} of {shown}?", "cancelling", "cancelled", "waiting task")
        change = partial(bulk_actions.cancel_tasks, storage)
        await change_all(waiting, change, words, yes, dry_run, as_json)

    with_queue(url, work)
