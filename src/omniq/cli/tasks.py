"""`omniq tasks`: list, show, run, change, cancel, delete and retry tasks."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Annotated

from omniq.cli import output
from omniq.cli.bulk import (
    RETRY_WORDS,
    DryRun,
    Every,
    Filters,
    Search,
    Words,
    change_all,
    check_choice,
    retry_dead_letters,
)
from omniq.cli.command import Argument, Group, Option
from omniq.cli.live_view import Interval, Watch, is_screen, live
from omniq.cli.options import Func, Json, Limit, Queue, Type, Url, Yes
from omniq.cli.parsing import count_of, parse_duration, parse_instant, relative_time
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.cli.task_output import shown_part, task_output
from omniq.cli.task_page import task_page
from omniq.models import Task, TaskStatus
from omniq.operations import bulk_actions
from omniq.operations.bulk_selection import (
    can_be_cancelled,
    can_be_deleted,
    can_be_made_due,
    lacks,
    new_values,
    select_dead,
    select_tasks,
)
from omniq.operations.find_tasks import full_id, full_ids
from omniq.operations.newest import newest_tasks
from omniq.operations.output_view import newest_output, parts_of
from omniq.operations.task_detail import task_detail
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.tasks.task_output import OutputChunk
from omniq.text.to_json import plain
from omniq.worker.process import console

app = Group("tasks", "List, show, run, change, cancel, delete and retry tasks.")
app.command("output")(task_output)

_SHOWN_CHUNKS = 50
"""How much of the end of the output is shown with a task."""

Ids = Annotated[
    list[str] | None,
    Argument(metavar="ID", help="Ids of tasks, or their beginnings.", complete="task"),
]
Status = Annotated[
    TaskStatus | None,
    Option(
        "--status",
        "-s",
        help="Only with this status: pending, running, retrying, success, failed or cancelled.",
    ),
]


@app.command("list")
def list_(
    url: Url = None,
    status: Status = None,
    queue: Queue = None,
    func: Func = None,
    task_type: Type = None,
    limit: Limit = 50,
    after: Annotated[
        str | None,
        Option("--after", metavar="ID", help="Continue after this id, oldest first."),
    ] = None,
    every: Annotated[bool, Option("--all", help="All tasks, oldest first.")] = False,
    watch: Watch = False,
    interval: Interval = 1.0,
    as_json: Json = False,
) -> None:
    """List the newest tasks, newest first; with `--after` or `--all`, in order of id."""
    if watch and (every or as_json):
        raise CommandFailed(
            "--watch shows a screen of tasks: give it without --all and --json; "
            "omniq events --json prints what happens",
            console.BAD_USAGE,
        )

    async def work(task_queue: AsyncTaskQueue) -> None:
        clock = task_queue.storage.clock

        async def live_page() -> list[output.Renderable]:
            found = await _chosen(task_queue, status, queue, func, task_type, limit, after, every)
            head = output.text(f"{count_of(len(found), 'task')}  q quits", "bold")
            return [head, "", _table(found, clock.now())]

        if watch and is_screen():
            await live(clock, interval, live_page)
            return
        if every and as_json:
            async for task in bulk_actions.all_tasks(
                task_queue.storage,
                status=status,
                queue=queue,
                func_path=func,
                after=after or "",
                task_type=task_type,
            ):
                output.print_json(task)
            return
        tasks = await _chosen(task_queue, status, queue, func, task_type, limit, after, every)
        if as_json:
            for task in tasks:
                output.print_json(task)
        elif tasks:
            output.show(_table(tasks, clock.now()))
        else:
            output.print_note("no tasks")

    with_queue(url, work)


async def _chosen(
    task_queue: AsyncTaskQueue,
    status: TaskStatus | None,
    queue: str | None,
    func: str | None,
    task_type: str | None,
    limit: int,
    after: str | None,
    every: bool,
) -> list[Task]:
    storage = task_queue.storage
    if after is None and not every:
        return await newest_tasks(
            storage, limit, status=status, queue=queue, func_path=func, task_type=task_type
        )
    if not every and task_type is None:
        return await storage.list_tasks(
            status=status, queue=queue, func_path=func, limit=limit, after=after
        )
    found: list[Task] = []
    async for task in bulk_actions.all_tasks(
        storage,
        status=status,
        queue=queue,
        func_path=func,
        after=after or "",
        task_type=task_type,
    ):
        if not every and len(found) == limit:
            break
        found.append(task)
    return found


def _table(tasks: list[Task], now: datetime) -> output.Renderable:
    rows = [
        (
            task.id,
            output.status_text(task.status),
            task.func_path,
            task.queue,
            relative_time(task.created_at, now),
            "" if task.status.is_final or task.owner else relative_time(task.eta, now),
            task.failures,
            task.priority,
        )
        for task in tasks
    ]
    columns = ("id", "status", "function", "queue", "enqueued", "due", ">failures", ">priority")
    return output.Listing(columns, rows, has_task_ids=True)


@app.command()
def show(
    task_id: Annotated[
        str, Argument(metavar="ID", help="Id of the task, or its beginning.", complete="task")
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show one task with its arguments, result, failed runs, timeline, and the end of its output."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        detail = await task_detail(storage, await full_id(storage, task_id))
        chunks = await newest_output(storage, detail.task.id, _SHOWN_CHUNKS)
        if as_json:
            output.print_json({**plain(detail), "output": chunks})
        else:
            output.show(*task_page(detail, task_queue.storage.clock.now()), *_output(chunks))

    with_queue(url, work)


def _output(chunks: list[OutputChunk]) -> list[output.Renderable]:
    return ["", output.text("output", "bold"), *map(shown_part, parts_of(chunks))] if chunks else []


@app.command()
def run(
    ids: Ids = None,
    url: Url = None,
    every: Every = False,
    status: Status = None,
    queue: Queue = None,
    func: Func = None,
    task_type: Type = None,
    search: Search = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make waiting tasks due now, also those that wait for a retry. A paused queue and limits still hold them."""
    filters = Filters(status, queue, func, task_type, search)
    check_choice(ids, every, filters.is_given, dry_run)

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        if every:
            now = storage.clock.now()
            fits, wanted = can_be_made_due(now), filters.search(now)
            change = partial(bulk_actions.run_now, storage)
            words = Words("Make {} due now?", "making due", "due now")
            await change_all(
                lambda: select_tasks(storage, wanted, fits), change, words, yes, dry_run, as_json
            )
            return
        for task_id in await full_ids(storage, ids):
            _print_change(await task_queue.run_now(task_id), "due now", as_json)

    with_queue(url, work)


@app.command()
def change(
    ids: Ids = None,
    url: Url = None,
    priority: Annotated[int | None, Option("--priority", "-p", help="Its new priority.")] = None,
    queue: Annotated[
        str | None, Option("--queue", "-q", help="Move it to this queue.", complete="queue")
    ] = None,
    eta: Annotated[
        str | None,
        Option("--eta", metavar="WHEN", help="Not before this time, such as 2026-01-31T12:00Z."),
    ] = None,
    delay: Annotated[
        str | None, Option("--delay", metavar="SPAN", help="Not before this time has passed.")
    ] = None,
    every: Every = False,
    status: Status = None,
    from_queue: Annotated[
        str | None,
        Option("--from-queue", metavar="QUEUE", help="Only of this queue.", complete="queue"),
    ] = None,
    func: Func = None,
    task_type: Type = None,
    search: Search = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Change the priority, queue or due time of waiting tasks. One that runs or has ended is refused."""
    seconds, instant = parse_duration("--delay", delay), parse_instant("--eta", eta)
    if priority is None and queue is None and instant is None and seconds is None:
        raise CommandFailed("give --priority, --queue, --eta or --delay", console.BAD_USAGE)
    filters = Filters(status, from_queue, func, task_type, search)
    check_choice(ids, every, filters.is_given, dry_run)

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        if every:
            now = storage.clock.now()
            wanted = filters.search(now)
            later = instant if seconds is None else now + timedelta(seconds=seconds)
            new = new_values(priority=priority, queue=queue, eta=later)
            await change_all(
                lambda: select_tasks(storage, wanted, lacks(new)),
                partial(bulk_actions.change_tasks, storage, **new),
                Words("Change {}?", "changing", "changed"),
                yes,
                dry_run,
                as_json,
            )
            return
        now = storage.clock.now()
        for task_id in await full_ids(storage, ids):
            task = await task_queue.change(
                task_id, priority=priority, queue=queue, eta=instant, delay=seconds
            )
            due = relative_time(task.eta, now) or "now"
            what = f"queue {task.queue}, priority {task.priority}, due {due}"
            _print_change(task, what, as_json)

    with_queue(url, work)


def _print_change(task: Task, what: str, as_json: bool) -> None:
    if as_json:
        output.print_json(task)
    else:
        output.print_line(f"{task.id}: {what}")


@app.command()
def cancel(
    ids: Ids = None,
    url: Url = None,
    every: Every = False,
    status: Status = None,
    queue: Queue = None,
    func: Func = None,
    task_type: Type = None,
    search: Search = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Cancel tasks: a waiting task will not run, a running one is asked to stop."""
    filters = Filters(status, queue, func, task_type, search)
    check_choice(ids, every, filters.is_given, dry_run)

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        change = partial(bulk_actions.cancel_tasks, storage)
        words = Words("Cancel {}?", "cancelling", "cancelled")
        if every:
            wanted = filters.search(storage.clock.now())
            await change_all(
                lambda: select_tasks(storage, wanted, can_be_cancelled),
                change,
                words,
                yes,
                dry_run,
                as_json,
            )
            return
        chosen = await full_ids(storage, ids)
        if len(chosen) == 1 and await task_queue.get_task(chosen[0]) is None:
            raise CommandFailed(f"task {chosen[0]}: no such task on record", console.NOT_FOUND)
        output.print_report(await change(chosen), words.done, as_json)

    with_queue(url, work)


@app.command()
def delete(
    ids: Ids = None,
    url: Url = None,
    every: Every = False,
    status: Status = None,
    queue: Queue = None,
    func: Func = None,
    task_type: Type = None,
    search: Search = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete finished tasks with their results and dead letters. Waiting and running tasks are refused."""
    filters = Filters(status, queue, func, task_type, search)
    check_choice(ids, every, filters.is_given, dry_run)

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        change = partial(bulk_actions.delete_tasks, storage)
        words = Words("Delete {} for good?", "deleting", "deleted")
        if every:
            wanted = filters.search(storage.clock.now())
            await change_all(
                lambda: select_tasks(storage, wanted, can_be_deleted, and_dead=True),
                change,
                words,
                yes,
                dry_run,
                as_json,
            )
            return
        done = await change(await full_ids(storage, ids))
        output.print_report(done, words.done, as_json)

    with_queue(url, work)


@app.command()
def retry(
    ids: Annotated[
        list[str] | None, Argument(metavar="ID", help="Ids of failed tasks.", complete="dead")
    ] = None,
    url: Url = None,
    every: Every = False,
    queue: Queue = None,
    func: Func = None,
    task_type: Type = None,
    search: Search = None,
    from_start: Annotated[bool, Option("--from-start", help="Run completed steps again.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run failed tasks again under their ids, as `omniq dead retry` does."""
    filters = Filters(None, queue, func, task_type, search)
    check_choice(ids, every, filters.is_given, dry_run)

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        if not every:
            chosen = await full_ids(storage, ids)
            await retry_dead_letters(task_queue, chosen, from_start, as_json)
            return
        wanted = filters.search(storage.clock.now())
        await change_all(
            lambda: select_dead(storage, wanted),
            partial(bulk_actions.retry_dead, storage, from_start=from_start),
            RETRY_WORDS,
            yes,
            dry_run,
            as_json,
        )

    with_queue(url, work)
