"""Commands that change all tasks or dead letters that match: filters, confirmation, progress, `--dry-run`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated

import msgspec

from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.parsing import count_of
from omniq.cli.queue_session import CommandFailed
from omniq.models import TaskStatus
from omniq.operations import bulk_actions
from omniq.operations.bulk_actions import BulkReport, change_in_steps
from omniq.operations.bulk_selection import Steps
from omniq.operations.search_query import TaskSearch, parse_search
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.process import console

Every = Annotated[bool, Option("--all", help="All tasks, or those that match the filters.")]
Search = Annotated[
    str | None,
    Option(
        "--search",
        "-S",
        metavar="TEXT",
        help="Only what this search finds: words, and qualifiers such as arg.order:17, meta.tenant:7, "
        "error:timeout, since:2h, as in the dashboard.",
    ),
]
DryRun = Annotated[
    bool, Option("--dry-run", help="Show how many match, and the first of them; change nothing.")
]

_SHOWN = 5


class Filters(msgspec.Struct, frozen=True):
    """The options that select tasks."""

    status: TaskStatus | None
    queue: str | None
    func: str | None
    task_type: str | None
    text: str | None

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return any(value is not None for value in msgspec.structs.astuple(self))

    def search(self, now: datetime) -> TaskSearch:
        """The search that they describe together."""
        found = searched(self.text, now)
        exact = {
            "status": self.status,
            "queue": self.queue,
            "func_path": self.func,
            "task_type": self.task_type,
        }
        given = {name: value for name, value in exact.items() if value is not None}
        return msgspec.structs.replace(found, **given)


def searched(text: str | None, now: datetime) -> TaskSearch:
    """The search of `--search`. An empty one is refused: the variable of a script may be empty by mistake."""
    if text is None:
        return TaskSearch()
    found = parse_search(text, now)
    if found.selects_all:
        raise CommandFailed("--search is empty: leave it out to select all", console.BAD_USAGE)
    return found


class Words(msgspec.Struct, frozen=True):
    """What a command says: the question, with `{}` for the number, and the verb while and after it is done."""

    question: str
    doing: str
    done: str
    one: str = "task"


RETRY_WORDS = Words("Retry {}?", "retrying", "back in the queue", "dead letter")


def check_choice(
    ids: list[str] | None, every: bool, is_filtered: bool, dry_run: bool = False
) -> None:
    """Refuse a command with neither ids nor --all, or with both."""
    if bool(ids) == every:
        raise CommandFailed("give either ids or --all", console.BAD_USAGE)
    if is_filtered and not every:
        raise CommandFailed("a filter needs --all: it selects from all of them", console.BAD_USAGE)
    if dry_run and not every:
        raise CommandFailed("--dry-run needs --all: it shows what would match", console.BAD_USAGE)


async def change_all(
    select: Callable[[], Steps],
    change: Callable[[Sequence[str]], Awaitable[BulkReport]],
    words: Words,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Count what is selected, ask, and change it in steps, with progress.

    What is stored meanwhile is changed too. An interruption leaves the rest for the next call.
    """
    total, first = await _count(select())
    if dry_run:
        _print_dry_run(total, first, words, as_json)
        return
    output.confirm(words.question.format(count_of(total, words.one)), yes)
    last = BulkReport(0, {})
    with output.progress_bar(words.doing) as progress:

        def on_step(report: BulkReport) -> None:
            nonlocal last
            last, count = report, report.done + report.refused_count
            progress(count, max(count, total))
            if as_json and count < total:
                output.print_json({"progress": count, "total": total})

        try:
            report = await change_in_steps(select(), change, on_step)
        except asyncio.CancelledError:
            output.print_note(
                f"interrupted; {words.done} until then: at least {last.done:,}; the same command does the rest"
            )
            raise
    output.print_report(report, words.done, as_json)


async def _count(steps: Steps) -> tuple[int, list[str]]:
    total, first = 0, list[str]()
    async for ids in steps:
        total += len(ids)
        first += ids[: _SHOWN - len(first)]
    return total, first


def _print_dry_run(total: int, first: Sequence[str], words: Words, as_json: bool) -> None:
    if as_json:
        output.print_json({"matches": total, "first": first})
        return
    output.print_line(f"{count_of(total, words.one)} would be {words.done}")
    for task_id in first:
        output.print_line(f"  {task_id}")
    if total > len(first):
        output.print_line(f"  and {total - len(first):,} more")


async def retry_dead_letters(
    task_queue: AsyncTaskQueue, ids: list[str], from_start: bool, as_json: bool
) -> None:
    """Retry dead letters by id. For a single id that is none, the error names the task's status."""
    if len(ids) == 1 and await task_queue.dead.get(ids[0]) is None:
        task = await task_queue.get_task(ids[0])
        if task is None:
            raise CommandFailed(f"task {ids[0]}: no such task on record", console.NOT_FOUND)
        raise CommandFailed(f"task {ids[0]} is {task.status}, not a dead letter: nothing to retry")
    retry = partial(bulk_actions.retry_dead, task_queue.storage, from_start=from_start)
    output.print_report(await retry(ids), RETRY_WORDS.done, as_json)
