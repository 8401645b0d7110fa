"""`omniq tasks`: list, show, run, change, cancel, delete and retry tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument, Group, Option
from omniq.cli.live_view import Interval, Watch, is_screen, live
from omniq.cli.options import Func, Json, Limit, Queue, Type, Url, Yes
from omniq.cli.parsing import (
    count_of,
    format_duration,
    format_instant,
    parse_duration,
    parse_instant,
    relative_time,
)
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.cli.task_output import shown_part, task_output
from omniq.models import Attempt, DeadLetter, Task, TaskStatus
from omniq.operations import bulk_actions
from omniq.operations.find_tasks import full_id, full_ids
from omniq.operations.formatting import as_argument, timeout_text
from omniq.operations.newest import newest_tasks
from omniq.operations.output_view import newest_output, parts_of
from omniq.operations.redaction import without_secrets
from omniq.operations.task_detail import UNVERIFIED, UNVERIFIED_LETTER, TaskDetail, task_detail
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.retry import policy_text
from omniq.task_output import OutputChunk
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


def task_page(detail: TaskDetail, now: datetime) -> list[output.Renderable]:
    """Everything about a task, for people."""
    task, result = detail.task, detail.result
    page: list[output.Renderable] = [
        output.key_values([*_identity(task, detail.dead, now), *_running(detail)])
    ]
    if task.status is TaskStatus.SUCCESS and result is not None:
        page += ["", output.key_values([("result", output.value_text(result.result))])]
        if result.warnings:
            page.append(output.key_values([("warning", warning) for warning in result.warnings]))
    elif result is not None and result.reason:
        page += ["", output.key_values([("because", result.reason)])]
    if detail.steps:
        done = [(step.name, output.value_text(step.result)) for step in detail.steps]
        page += ["", output.Listing(("step done", "result"), done)]
    for attempt in detail.attempts:
        page += ["", *_attempt(attempt)]
    rows = [(format_instant(each.at), each.what, each.detail) for each in detail.timeline]
    page += ["", output.Listing(("time", "what", ""), rows)]
    if detail.dead is not None:
        page += ["", f"Run it again: omniq dead retry {as_argument(task.id)}"]
    elif not task.status.is_final:
        page += ["", f"Why it has not ended: omniq explain {as_argument(task.id)}"]
    return page


def _output(chunks: list[OutputChunk]) -> list[output.Renderable]:
    return ["", output.text("output", "bold"), *map(shown_part, parts_of(chunks))] if chunks else []


def _identity(
    task: Task, letter: DeadLetter | None, now: datetime
) -> list[tuple[str, output.Cell]]:
    safe = without_secrets(task)
    return [
        ("id", task.id),
        ("status", output.status_text(task.status)),
        ("function", task.func_path),
        ("queue", task.queue),
        ("priority", task.priority),
        ("call", "" if task.is_verified else UNVERIFIED),
        ("dead letter", "" if letter is None or letter.is_verified else UNVERIFIED_LETTER),
        ("arguments", output.value_text(safe.args) if task.args else ""),
        ("keywords", output.value_text(safe.kwargs) if task.kwargs else ""),
        ("metadata", output.value_text(task.metadata) if task.metadata else ""),
        ("enqueued", f"{format_instant(task.created_at)} ({relative_time(task.created_at, now)})"),
        ("type", task.task_type or ""),
        ("failures", f"{task.failures} of {count_of(task.max_retries + 1, 'attempt')} at most"),
        ("retry", _retry_text(task)),
        ("crashes", task.crashes or ""),
        ("timeout", timeout_text(task)),
        ("expires", format_instant(task.expires)),
        ("repeats", _repeats_text(task)),
        ("unique", task.unique or ""),
        ("schedule", task.schedule_id or ""),
        ("limits", output.value_text(task.limits) if task.limits else ""),
        ("breakers", ", ".join(rule.name for rule in task.breakers)),
    ]


def _retry_text(task: Task) -> str:
    policy = task.retry_delays or task.retry
    return policy_text(policy) if policy else ""


def _repeats_text(task: Task) -> str:
    text = task.cron or (f"every {format_duration(task.interval)}" if task.interval else "")
    return f"{text}, also after a failure" if task.reschedule_on_failure else text


def _running(detail: TaskDetail) -> list[tuple[str, output.Cell]]:
    task, progress = detail.task, detail.progress
    return [
        ("worker", task.owner or ""),
        ("claim", task.token if task.owner else ""),
        ("progress", "" if progress is None else f"{progress.fraction:.0%} {progress.message}"),
        ("cancelled", "requested, not done yet" if task.cancel_requested and task.owner else ""),
        ("on_dead", _hook_text(detail)),
    ]


def _hook_text(detail: TaskDetail) -> str:
    hook = detail.pending_hook
    if hook is None:
        return ""
    return f"not ended yet, worker {hook.owner}" if hook.owner else "waits for a worker"


def _attempt(attempt: Attempt) -> list[output.Renderable]:
    error = attempt.error
    head = f"attempt {attempt.number} {attempt.outcome} at {format_instant(attempt.finished_at)}"
    if error is None:
        return [output.text(head, "bold")]
    line = f"{head}: {error.error_type}: {error.message}"
    # A traceback ends with the message; without one, this line alone has it.
    shown: list[output.Renderable] = (
        [output.text(line, "bold"), output.block(error.traceback)]
        if error.traceback
        else [output.block(line)]
    )
    if error.recovery_hint:
        shown.append(output.block(f"hint: {error.recovery_hint}"))
    return shown


@app.command()
def run(
    ids: Annotated[
        list[str],
        Argument(metavar="ID", help="Ids of tasks, or their beginnings.", complete="task"),
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make waiting tasks due now, also those that wait for a retry. A paused queue and limits still hold them."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for task_id in await full_ids(task_queue.storage, ids):
            _print_change(await task_queue.run_now(task_id), "due now", as_json)

    with_queue(url, work)


@app.command()
def change(
    ids: Annotated[
        list[str],
        Argument(metavar="ID", help="Ids of tasks, or their beginnings.", complete="task"),
    ],
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
    as_json: Json = False,
) -> None:
    """Change the priority, queue or due time of waiting tasks. One that runs or has ended is refused."""
    seconds, instant = parse_duration("--delay", delay), parse_instant("--eta", eta)
    if priority is None and queue is None and instant is None and seconds is None:
        raise CommandFailed("give --priority, --queue, --eta or --delay", console.BAD_USAGE)

    async def work(task_queue: AsyncTaskQueue) -> None:
        now = task_queue.storage.clock.now()
        for task_id in await full_ids(task_queue.storage, ids):
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
    every: Annotated[
        bool,
        Option("--all", help="All waiting and running tasks, or those that match the filters."),
    ] = False,
    status: Status = None,
    queue: Queue = None,
    func: Func = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Cancel tasks: a waiting task will not run, a running one is asked to stop."""
    check_choice(ids, every, any((status, queue, func)))

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = await full_ids(task_queue.storage, ids)
        chosen = chosen or await _ids(task_queue, status, queue, func, ended=False)
        if every:
            output.confirm(f"Cancel {count_of(len(chosen), 'task')}?", yes)
        elif len(chosen) == 1 and await task_queue.get_task(chosen[0]) is None:
            raise CommandFailed(f"task {chosen[0]}: no such task on record", console.NOT_FOUND)
        with output.progress_bar("cancelling") as progress:
            done = await bulk_actions.cancel_tasks(task_queue.storage, chosen, on_progress=progress)
        output.print_report(done, "cancelled", as_json)

    with_queue(url, work)


async def _ids(
    task_queue: AsyncTaskQueue,
    status: TaskStatus | None,
    queue: str | None,
    func: str | None,
    *,
    ended: bool,
) -> list[str]:
    return [
        task.id
        async for task in bulk_actions.all_tasks(
            task_queue.storage, status=status, queue=queue, func_path=func
        )
        if task.status.is_final is ended
    ]


@app.command()
def delete(
    ids: Ids = None,
    url: Url = None,
    every: Annotated[
        bool, Option("--all", help="All finished tasks, or those that match the filters.")
    ] = False,
    status: Status = None,
    queue: Queue = None,
    func: Func = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete finished tasks with their results and dead letters. Waiting and running tasks are refused."""
    check_choice(ids, every, any((status, queue, func)))

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = await full_ids(task_queue.storage, ids)
        chosen = chosen or await _ids(task_queue, status, queue, func, ended=True)
        if every:
            output.confirm(f"Delete {count_of(len(chosen), 'task')} for good?", yes)
        with output.progress_bar("deleting") as progress:
            done = await bulk_actions.delete_tasks(task_queue.storage, chosen, on_progress=progress)
        output.print_report(done, "deleted", as_json)

    with_queue(url, work)


@app.command()
def retry(
    ids: Annotated[list[str], Argument(metavar="ID", help="Ids of failed tasks.", complete="dead")],
    url: Url = None,
    from_start: Annotated[bool, Option("--from-start", help="Run completed steps again.")] = False,
    as_json: Json = False,
) -> None:
    """Run failed tasks again under their ids, as `omniq dead retry` does."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = await full_ids(task_queue.storage, ids)
        await retry_dead_letters(task_queue, chosen, from_start, as_json)

    with_queue(url, work)


async def retry_dead_letters(
    task_queue: AsyncTaskQueue, ids: list[str], from_start: bool, as_json: bool
) -> None:
    """Retry dead letters. For a single id that is none, the error names the task's status."""
    if len(ids) == 1 and await task_queue.dead.get(ids[0]) is None:
        task = await task_queue.get_task(ids[0])
        if task is None:
            raise CommandFailed(f"task {ids[0]}: no such task on record", console.NOT_FOUND)
        raise CommandFailed(f"task {ids[0]} is {task.status}, not a dead letter: nothing to retry")
    with output.progress_bar("retrying") as progress:
        done = await bulk_actions.retry_dead(
            task_queue.storage, ids, from_start=from_start, on_progress=progress
        )
    output.print_report(done, "back in the queue", as_json)


def check_choice(ids: list[str] | None, every: bool, is_filtered: bool) -> None:
    """Refuse a command with neither ids nor --all, or with both."""
    if bool(ids) == every:
        raise CommandFailed("give either ids or --all", console.BAD_USAGE)
    if is_filtered and not every:
        raise CommandFailed("a filter needs --all: it selects from all of them", console.BAD_USAGE)
