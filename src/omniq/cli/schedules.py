"""`omniq schedules`: tasks that are enqueued at certain times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from omniq.cli import output
from omniq.cli.command import Argument, Group, Option
from omniq.cli.enqueue import function_at
from omniq.cli.options import Json, Url, Yes
from omniq.cli.parsing import (
    count_of,
    format_instant,
    parse_duration,
    parse_instant,
    parse_json_value,
    parse_pairs,
    relative_time,
)
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.models import MissedPolicy, OverlapPolicy, Schedule
from omniq.operations.redaction import without_secrets
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.scheduling.schedules import ScheduleOptions
from omniq.storage.sealed_documents import OlderDocument
from omniq.tasks.options import option_help
from omniq.worker.process import console

if TYPE_CHECKING:
    from datetime import datetime

app = Group("schedules", "List, add, pause and trigger schedules.")

Id = Annotated[str, Argument(metavar="ID", help="Id of the schedule.", complete="schedule")]


@app.command("list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """List all schedules with their next and last times."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await task_queue.schedules.list()
        older = await task_queue.storage.older_documents(max_pages=0)
        if as_json:
            for schedule in found:
                output.print_json(schedule)
        elif found or older:
            now = task_queue.storage.clock.now()
            rows = [_row(each, now) for each in found] + [_older_row(each) for each in older]
            output.show(output.Listing(_COLUMNS, rows))
        else:
            output.print_note("no schedules")
        if older:
            output.print_note(
                f"{count_of(len(older), 'schedule')} of an older omniq: not signed as a whole, and so not "
                "fired; to see and sign them, run: omniq schema upgrade"
            )

    with_queue(url, work)


_COLUMNS = ("schedule", "when", "next", "function", "state", "last", "missed", "overlap")


def _row(schedule: Schedule, now: datetime) -> tuple[output.Cell, ...]:
    state = "paused" if schedule.paused else "over" if schedule.next_at is None else "active"
    colour = {"paused": "yellow", "over": "dim", "active": "green"}[state]
    return (
        schedule.id,
        timing(schedule),
        "" if schedule.paused else relative_time(schedule.next_at, now),
        schedule.task.func_path,
        output.text(state, colour),
        relative_time(schedule.last_at, now),
        schedule.missed,
        schedule.overlap,
    )


def _older_row(older: OlderDocument) -> tuple[output.Cell, ...]:
    when = "" if older.schedule is None else timing(older.schedule)
    return (older.id, when, "", older.func_path, output.text("unsigned", "red"), "", "", "")


def timing(schedule: Schedule) -> str:
    """The times of a schedule in short form: its cron expression, interval or instant."""
    if schedule.cron is not None:
        return f"{schedule.cron} {schedule.tz or 'UTC'}"
    if schedule.interval is not None:
        return f"every {schedule.interval:g} s"
    return f"at {format_instant(schedule.at)}"


@app.command()
def show(
    schedule_id: Id,
    url: Url = None,
    count: Annotated[
        int, Option("--next", "-n", min=0, max=1000, help="Number of next times to show.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """Show one schedule and its next times."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        schedule = await _found(task_queue, schedule_id)
        upcoming = await task_queue.schedules.upcoming(schedule_id, count)
        if as_json:
            output.print_json({"schedule": schedule, "upcoming": upcoming})
            return
        task = without_secrets(schedule.task)
        pairs: list[tuple[str, output.Cell]] = [
            ("schedule", schedule.id),
            ("when", timing(schedule)),
            ("function", task.func_path),
            ("arguments", output.value_text(task.args) if task.args else ""),
            ("keywords", output.value_text(task.kwargs) if task.kwargs else ""),
            ("queue", task.queue),
            ("state", "paused" if schedule.paused else ""),
            ("from code", (schedule.module or "yes") if schedule.declared else ""),
            ("missed", schedule.missed),
            ("overlap", schedule.overlap),
            ("jitter", f"{schedule.jitter:g} s" if schedule.jitter else ""),
            ("from", format_instant(schedule.start)),
            ("to", format_instant(schedule.end)),
            ("last", format_instant(schedule.last_at)),
        ]
        now = task_queue.storage.clock.now()
        times = [("next", f"{format_instant(at)} ({relative_time(at, now)})") for at in upcoming]
        output.show(output.key_values([*pairs, *times]))

    with_queue(url, work)


@app.command()
def add(
    schedule_id: Annotated[str, Argument(metavar="ID", help="Id of the schedule.")],
    func: Annotated[str, Argument(metavar="FUNC", help="Path of the function: module.function.")],
    args: Annotated[
        list[str] | None, Argument(metavar="ARGS", help="Its arguments as JSON.")
    ] = None,
    kwargs: Annotated[
        list[str] | None,
        Option("--kwargs", "-k", metavar="NAME=JSON", help="A keyword argument; repeatable."),
    ] = None,
    url: Url = None,
    cron: Annotated[str | None, Option("--cron", metavar="EXPR", help=option_help("cron"))] = None,
    tz: Annotated[str | None, Option("--tz", help=option_help("tz"))] = None,
    interval: Annotated[
        str | None, Option("--interval", metavar="SPAN", help=option_help("interval"))
    ] = None,
    at: Annotated[str | None, Option("--at", metavar="WHEN", help=option_help("at"))] = None,
    start: Annotated[
        str | None, Option("--start", metavar="WHEN", help=option_help("start"))
    ] = None,
    end: Annotated[str | None, Option("--end", metavar="WHEN", help=option_help("end"))] = None,
    missed: Annotated[
        str,
        Option("--missed", metavar="skip|once|all", help=option_help("missed")),
    ] = "once",
    overlap: Annotated[
        str,
        Option(
            "--overlap",
            metavar="allow|skip|queue|cancel_old",
            help=option_help("overlap"),
        ),
    ] = "allow",
    jitter: Annotated[
        str | None, Option("--jitter", metavar="SPAN", help=option_help("jitter"))
    ] = None,
    queue: Annotated[str | None, Option("--queue", "-q", help=option_help("queue"))] = None,
    priority: Annotated[
        int | None, Option("--priority", "-p", help=option_help("priority"))
    ] = None,
    version: Annotated[
        int | None, Option("--arguments-version", metavar="N", help=option_help("version"))
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a schedule that enqueues calls of a function; replaces a schedule with the same id."""
    values = [parse_json_value("argument", text) for text in args or ()]
    named = parse_pairs("--kwargs", kwargs or ())
    options: ScheduleOptions = {
        "cron": cron,
        "tz": tz,
        "interval": parse_duration("--interval", interval),
        "at": parse_instant("--at", at),
        "start": parse_instant("--start", start),
        "end": parse_instant("--end", end),
        "missed": cast(MissedPolicy, missed),
        "overlap": cast(OverlapPolicy, overlap),
        "jitter": parse_duration("--jitter", jitter) or 0.0,
        "queue": queue,
        "priority": priority,
        "version": version,
    }
    function = function_at(func)

    async def work(task_queue: AsyncTaskQueue) -> None:
        schedule = await task_queue.schedules.add(
            schedule_id, function, args=values, kwargs=named, **options
        )
        if as_json:
            output.print_json(schedule)
        else:
            now = task_queue.storage.clock.now()
            output.print_line(
                f"{schedule.id}: {timing(schedule)}, next {format_instant(schedule.next_at)} "
                f"({relative_time(schedule.next_at, now)})"
            )

    with_queue(url, work, creates=True)


@app.command()
def pause(schedule_id: Id, url: Url = None, as_json: Json = False) -> None:
    """Pause a schedule: it enqueues nothing until it is resumed."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        await task_queue.schedules.pause(schedule_id)
        output.print_pause("schedule", schedule_id, is_paused=True, as_json=as_json)

    with_queue(url, work)


@app.command()
def resume(schedule_id: Id, url: Url = None, as_json: Json = False) -> None:
    """Resume a schedule from its next time on."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        schedule = await task_queue.schedules.resume(schedule_id)
        if as_json:
            output.print_json(
                {"schedule": schedule_id, "paused": False, "next_at": schedule.next_at}
            )
        else:
            output.print_line(f"resumed: {schedule_id}, next {format_instant(schedule.next_at)}")

    with_queue(url, work)


@app.command()
def trigger(schedule_id: Id, url: Url = None, as_json: Json = False) -> None:
    """Enqueue the schedule's task now and print the task's id. Its next time does not change."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        handle = await task_queue.schedules.trigger(schedule_id)
        output.print_json({"id": handle.id}) if as_json else output.print_line(handle.id)

    with_queue(url, work)


@app.command()
def delete(schedule_id: Id, url: Url = None, yes: Yes = False, as_json: Json = False) -> None:
    """Delete a schedule. Tasks that it has enqueued are not affected."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        await _found(task_queue, schedule_id)
        output.confirm(f"Delete schedule {schedule_id}?", yes)
        await task_queue.schedules.delete(schedule_id)
        if as_json:
            output.print_json({"schedule": schedule_id, "deleted": True})
        else:
            output.print_line(f"deleted: {schedule_id}")

    with_queue(url, work)


@app.command()
def backfill(
    schedule_id: Id,
    start: Annotated[
        str, Option("--start", metavar="WHEN", help="Start of the window: 2026-01-01T00:00Z.")
    ],
    end: Annotated[
        str, Option("--end", metavar="WHEN", help="End of the window: 2026-01-31T00:00Z.")
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Enqueue a task for each time within a window that has no task yet."""
    first, last = parse_instant("--start", start), parse_instant("--end", end)

    async def work(task_queue: AsyncTaskQueue) -> None:
        if first is None or last is None:
            return
        handles = await task_queue.schedules.backfill(schedule_id, first, last)
        if as_json:
            for handle in handles:
                output.print_json({"id": handle.id})
        else:
            output.print_line(f"enqueued: {count_of(len(handles), 'task')}")

    with_queue(url, work)


async def _found(task_queue: AsyncTaskQueue, schedule_id: str) -> Schedule:
    schedule = await task_queue.schedules.get(schedule_id)
    if schedule is None:
        raise CommandFailed(f"schedule {schedule_id}: no such schedule", console.NOT_FOUND)
    return schedule
