"""`omniq explain` and `omniq purge`: one question, one broom."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli import output
from omniq.cli.options import Json, Url, Yes
from omniq.cli.parsing import count_of, format_instant, parse_duration, relative_time
from omniq.cli.queue_session import with_queue
from omniq.operations import bulk_actions
from omniq.operations.explain import Explanation, Reason
from omniq.operations.explain import explain as explain_task
from omniq.queue.async_queue import AsyncTaskQueue

if TYPE_CHECKING:
    from rich.console import RenderableType


def explain(
    task_id: Annotated[str, typer.Argument(metavar="TASK_ID", help="Which task.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Why a task does not run, who runs it, or how it ended."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        explanation = await explain_task(task_queue.storage, task_id)
        if as_json:
            output.print_json(explanation)
        else:
            output.print_rich(*_page(explanation, task_queue.storage.clock.now()))

    with_queue(url, work)


def _page(explanation: Explanation, now: datetime) -> list[RenderableType]:
    head = output.text(f"{explanation.task_id} {explanation.func_path} ", "bold")
    head.append_text(output.status_text(explanation.status))
    page: list[RenderableType] = [head]
    for number, reason in enumerate(explanation.reasons, start=1):
        page.append(output.line(f"  {number}. {reason.text}{_when(reason, now)}"))
        if reason.hint:
            page.append(output.line(f"     → {reason.hint}"))
    return page


def _when(reason: Reason, now: datetime) -> str:
    words = [
        f"{word} {format_instant(instant)} ({relative_time(instant, now)})"
        for word, instant in (("since", reason.since), ("until", reason.until))
        if instant is not None
    ]
    return f"; {', '.join(words)}" if words else ""


def purge(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="SPAN", help="Ended longer ago: 12h, 7d; 0: all.")
    ],
    url: Url = None,
    dead: Annotated[bool, typer.Option("--dead", help="Dead letters as well.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Forget finished tasks and their results. What waits or runs is never touched."""
    seconds = parse_duration("--older-than", older_than) or 0.0

    async def work(task_queue: AsyncTaskQueue) -> None:
        also = " and all dead letters" if dead else ""
        output.confirm(f"Forget all tasks that ended more than {older_than} ago{also}?", yes)
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
            output.print_line(f"forgotten: {count_of(count, 'task')}{also}")

    with_queue(url, work)
