"""`omniq purge`: delete finished tasks and their results."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.options import Json, Url, Yes
from omniq.cli.parsing import count_of, parse_duration
from omniq.cli.queue_session import with_queue
from omniq.operations import bulk_actions
from omniq.operations.formatting import format_duration
from omniq.queue.async_queue import AsyncTaskQueue


def purge(
    older_than: Annotated[
        str,
        Option(
            "--older-than",
            metavar="SPAN",
            help="Only tasks that ended longer ago than this, such as 12h or 7d; 0 for all.",
        ),
    ],
    url: Url = None,
    dead: Annotated[bool, Option("--dead", help="Purge dead letters too.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete finished tasks and their results. Waiting and running tasks are not affected."""
    seconds = parse_duration("--older-than", older_than) or 0.0

    async def work(task_queue: AsyncTaskQueue) -> None:
        also = " and all dead letters" if dead else ""
        age = f" more than {format_duration(seconds)} ago" if seconds else ""
        output.confirm(f"Delete all tasks that ended{age}{also}?", yes)
        before = task_queue.storage.clock.now() - timedelta(seconds=seconds)
        letters = 0
        with output.progress_bar("purging") as progress:
            count = await bulk_actions.purge(task_queue.storage, before, on_progress=progress)
            if dead:
                letters = await bulk_actions.purge(
                    task_queue.storage, before, dead=True, on_progress=progress
                )
        if as_json:
            output.print_json({"tasks": count, "dead": letters})
        else:
            also = f", {count_of(letters, 'dead letter')}" if dead else ""
            output.print_line(f"purged: {count_of(count, 'task')}{also}")

    with_queue(url, work)
