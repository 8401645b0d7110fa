"""`omniq dead`: the tasks that failed for good."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO, TypedDict

import msgspec

from omniq.cli import output
from omniq.cli.bulk import (
    RETRY_WORDS,
    DryRun,
    Search,
    Words,
    change_all,
    check_choice,
    retry_dead_letters,
    searched,
)
from omniq.cli.command import Argument, Group, Option
from omniq.cli.options import Func, Json, Limit, Type, Url, Yes
from omniq.cli.parsing import count_of, letter_line, parse_duration, parse_json_value, relative_time
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.cli.task_page import task_page
from omniq.errors import InvalidTask
from omniq.operations import bulk_actions
from omniq.operations.bulk_selection import Steps, select_dead
from omniq.operations.find_tasks import full_id, full_ids
from omniq.operations.formatting import format_duration
from omniq.operations.newest import newest_dead
from omniq.operations.task_detail import task_detail
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.process import console

app = Group("dead", "List dead letters: tasks that failed for good. Retry or delete them.")

Ids = Annotated[
    list[str] | None,
    Argument(metavar="ID", help="Ids of dead letters, or their beginnings.", complete="dead"),
]
Every = Annotated[bool, Option("--all", help="All dead letters, or those that match the filters.")]
Since = Annotated[
    str | None,
    Option("--since", metavar="SPAN", help="Only those that failed within this time, such as 1h."),
]
Until = Annotated[
    str | None,
    Option(
        "--until", metavar="SPAN", help="Only those that failed longer ago than this, such as 7d."
    ),
]
_DELETE_WORDS = Words("Delete {} for good?", "deleting", "deleted", "dead letter")

Reason = Annotated[str | None, Option("--reason", "-r", help="Only with this failure reason.")]


@app.command("list")
def list_(
    url: Url = None,
    func_path: Func = None,
    task_type: Type = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    after: Annotated[
        str | None,
        Option("--after", metavar="ID", help="Continue after this id, in id order."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the newest dead letters, latest failure first; with `--after`, in order of id."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = _filters(task_queue, func_path, task_type, reason, since, until)
        if after is None:
            found = await newest_dead(task_queue.storage, limit, **chosen)
        else:
            found = await task_queue.storage.list_dead(**chosen, limit=limit, after=after)
        if as_json:
            for letter in found:
                output.print_json(letter)
            return
        if not found:
            output.print_note("no dead letters")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                letter.task_id,
                letter.func_path,
                relative_time(letter.last_failure, now),
                letter_line(letter),
                output.text(letter.failure_reason, "red"),
                letter.attempt_count,
                letter.queue,
            )
            for letter in found
        ]
        columns = ("id", "function", "failed", "error", "reason", ">attempts", "queue")
        output.show(output.Listing(columns, rows, has_task_ids=True))

    with_queue(url, work)


@app.command()
def show(
    task_id: Annotated[
        str,
        Argument(metavar="ID", help="Id of the dead letter, or its beginning.", complete="dead"),
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show one dead letter with its call, every failed run and its traceback."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        letter_id = await full_id(task_queue.storage, task_id)
        if await task_queue.dead.get(letter_id) is None:
            raise CommandFailed(f"{task_id}: no such dead letter", console.NOT_FOUND)
        detail = await task_detail(task_queue.storage, letter_id)
        if as_json:
            output.print_json(detail)
        else:
            output.show(*task_page(detail, task_queue.storage.clock.now()))

    with_queue(url, work)


@app.command()
def retry(
    ids: Ids = None,
    url: Url = None,
    every: Every = False,
    func_path: Func = None,
    task_type: Type = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    search: Search = None,
    from_start: Annotated[bool, Option("--from-start", help="Run completed steps again.")] = False,
    args: Annotated[
        str | None,
        Option("--args", metavar="JSON", help="New arguments, as a list: '[1, 2]'."),
    ] = None,
    kwargs: Annotated[
        str | None,
        Option("--kwargs", metavar="JSON", help="""New keyword arguments: '{"a": 1}'."""),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run dead letters again under their ids; a task with durable steps resumes after the completed ones."""
    filters = (func_path, task_type, reason, since, until)
    check_choice(ids, every, any(each is not None for each in (*filters, search)), dry_run)
    if (args is not None or kwargs is not None) and (every or len(ids or ()) != 1):
        raise CommandFailed("--args and --kwargs need exactly one id", console.BAD_USAGE)
    other_args, other_kwargs = (
        _container("--args", args, list),
        _container("--kwargs", kwargs, dict),
    )

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = await full_ids(task_queue.storage, ids)
        if chosen and (other_args is not None or other_kwargs is not None):
            if not await task_queue.dead.retry(
                chosen[0], args=other_args, kwargs=other_kwargs, from_start=from_start
            ):
                raise CommandFailed(f"{chosen[0]}: no such dead letter", console.NOT_FOUND)
            output.print_report(bulk_actions.BulkReport(1, {}), "back in the queue", as_json)
            return
        if not every:
            await retry_dead_letters(task_queue, chosen, from_start, as_json)
            return
        change = partial(bulk_actions.retry_dead, task_queue.storage, from_start=from_start)
        select = _selection(task_queue, filters, search)
        await change_all(select, change, RETRY_WORDS, yes, dry_run, as_json)

    with_queue(url, work)


@app.command()
def delete(
    ids: Ids = None,
    url: Url = None,
    every: Every = False,
    func_path: Func = None,
    task_type: Type = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    search: Search = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good: some by id, or with `--all` those that match the filters."""
    filters = (func_path, task_type, reason, since, until)
    check_choice(ids, every, any(each is not None for each in (*filters, search)), dry_run)

    async def work(task_queue: AsyncTaskQueue) -> None:
        change = partial(bulk_actions.delete_dead, task_queue.storage)
        if every:
            select = _selection(task_queue, filters, search)
            await change_all(select, change, _DELETE_WORDS, yes, dry_run, as_json)
            return
        chosen = await full_ids(task_queue.storage, ids)
        if len(chosen) == 1 and await task_queue.dead.get(chosen[0]) is None:
            raise CommandFailed(f"{chosen[0]}: no such dead letter", console.NOT_FOUND)
        output.confirm(_DELETE_WORDS.question.format(count_of(len(chosen), "dead letter")), yes)
        output.print_report(await change(chosen), _DELETE_WORDS.done, as_json)

    with_queue(url, work)


def _selection(
    task_queue: AsyncTaskQueue,
    filters: tuple[str | None, str | None, str | None, str | None, str | None],
    text: str | None,
) -> Callable[[], Steps]:
    """What selects the dead letters that match."""
    storage, chosen = task_queue.storage, _filters(task_queue, *filters)
    found = searched(text, storage.clock.now())
    task_type = chosen["task_type"] or found.task_type
    wanted = msgspec.structs.replace(found, func_path=chosen["func_path"], task_type=task_type)
    return lambda: select_dead(
        storage, wanted, reason=chosen["reason"], since=chosen["since"], until=chosen["until"]
    )


@app.command()
def purge(
    older_than: Annotated[
        str,
        Option(
            "--older-than",
            metavar="SPAN",
            help="Only those that failed longer ago than this, such as 12h or 30d.",
        ),
    ],
    url: Url = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters whose last failure is older than an age."""
    seconds = parse_duration("--older-than", older_than) or 0.0

    async def work(task_queue: AsyncTaskQueue) -> None:
        age = f" older than {format_duration(seconds)}" if seconds else ""
        output.confirm(f"Delete all dead letters{age} for good?", yes)
        before = task_queue.storage.clock.now() - timedelta(seconds=seconds)
        with output.progress_bar("purging") as progress:
            count = await bulk_actions.purge(
                task_queue.storage, before, dead=True, on_progress=progress
            )
        output.print_report(bulk_actions.BulkReport(count, {}), "dead letters purged", as_json)

    with_queue(url, work)


@app.command()
def export(
    file: Annotated[
        Path | None, Argument(metavar="FILE", help="The file to write; stdout if not given.")
    ] = None,
    url: Url = None,
    func_path: Func = None,
    task_type: Type = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
) -> None:
    """Export dead letters as JSON lines, each with its call, failed runs and tracebacks."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        chosen = _filters(task_queue, func_path, task_type, reason, since, until)
        total, count = len(await bulk_actions.dead_ids(task_queue.storage, **chosen)), 0
        with output.progress_bar("exporting") as progress, _destination(file) as stream:
            async for record in task_queue.dead.export(**chosen):
                output.print_json(record, stream)
                count += 1
                progress(count, total)
        output.print_note(f"{count_of(count, 'dead letter')} exported")

    with_queue(url, work)


@contextmanager
def _destination(file: Path | None) -> Iterator[TextIO]:
    if file is None:
        yield sys.stdout
        return
    try:
        with file.open("w", encoding="utf-8") as stream:
            yield stream
    except OSError as error:
        raise CommandFailed(f"cannot write {file}: {error.strerror}") from error


class _Filters(TypedDict):
    func_path: str | None
    task_type: str | None
    reason: str | None
    since: datetime | None
    until: datetime | None


def _filters(
    task_queue: AsyncTaskQueue,
    func_path: str | None,
    task_type: str | None,
    reason: str | None,
    since: str | None,
    until: str | None,
) -> _Filters:
    now = task_queue.storage.clock.now()
    first, last = (
        None if seconds is None else now - timedelta(seconds=seconds)
        for seconds in (parse_duration("--since", since), parse_duration("--until", until))
    )
    return {
        "func_path": func_path,
        "task_type": task_type,
        "reason": reason,
        "since": first,
        "until": last,
    }


def _container(name: str, text: str | None, kind: type[Any]) -> Any:
    if text is None:
        return None
    value = parse_json_value(name, text)
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise InvalidTask(f"{name} {text}: expected {wanted} in JSON")
    return value
