"""`omniq explain`: why a task does not run."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument
from omniq.cli.options import Json, Url
from omniq.cli.parsing import format_instant, relative_time
from omniq.cli.queue_session import with_queue
from omniq.operations.explain import Explanation, Reason
from omniq.operations.explain import explain as explain_task
from omniq.operations.find_tasks import full_id
from omniq.queue.async_queue import AsyncTaskQueue


def explain(
    task_id: Annotated[
        str,
        Argument(metavar="TASK_ID", help="The id of the task, or its beginning.", complete="task"),
    ],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Say why a task does not run, which worker runs it, or how it ended."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        storage = task_queue.storage
        explanation = await explain_task(storage, await full_id(storage, task_id))
        if as_json:
            output.print_json(explanation)
        else:
            output.show(*_page(explanation, task_queue.storage.clock.now()))

    with_queue(url, work)


def _page(explanation: Explanation, now: datetime) -> list[output.Renderable]:
    head = output.Text.of(
        output.text(f"{explanation.task_id} {explanation.func_path} ", "bold"),
        output.status_text(explanation.status),
    )
    page: list[output.Renderable] = [head]
    for number, reason in enumerate(explanation.reasons, start=1):
        page.append(output.line(f"  {number}. {reason.text}{_when(reason, now)}"))
        if reason.hint:
            page.append(output.line(f"     → {reason.hint}"))
    return page


def _when(reason: Reason, now: datetime) -> str:
    times = [
        f"{name} {format_instant(instant)} ({relative_time(instant, now)})"
        for name, instant in (("since", reason.since), ("until", reason.until))
        if instant is not None
    ]
    return f"; {', '.join(times)}" if times else ""
