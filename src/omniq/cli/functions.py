"""`omniq functions`: pause and resume functions."""

from __future__ import annotations

from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument, Group
from omniq.cli.options import Json, PauseReason, PauseSpan, Url
from omniq.cli.parsing import parse_duration, relative_time
from omniq.cli.queue_session import with_queue
from omniq.queue.async_queue import AsyncTaskQueue

app = Group("functions", "List the functions that are paused; pause and resume functions.")

Names = Annotated[
    list[str],
    Argument(metavar="FUNC", help="Paths of functions, or their names.", complete="function"),
]


@app.command("list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """List the functions that are paused, with the reason and the end of the pause."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        pauses = await task_queue.functions.paused()
        now = task_queue.storage.clock.now()
        if as_json:
            for pause in pauses:
                output.print_json(pause)
        elif pauses:
            rows = [(each.name, relative_time(each.until, now), each.reason) for each in pauses]
            output.show(output.Listing(("function", "ends", "reason"), rows))
        else:
            output.print_note("no function is paused")

    with_queue(url, work)


@app.command()
def pause(
    names: Names,
    url: Url = None,
    reason: PauseReason = "",
    span: PauseSpan = None,
    as_json: Json = False,
) -> None:
    """Pause functions: workers claim no tasks of them, from any queue. Running tasks continue, and tasks can be enqueued."""
    until = parse_duration("--for", span)

    async def work(task_queue: AsyncTaskQueue) -> None:
        for name in names:
            await task_queue.functions.pause(name, reason=reason, until=until)
            output.print_pause("function", name, is_paused=True, as_json=as_json)

    with_queue(url, work, creates=True)


@app.command()
def resume(names: Names, url: Url = None, as_json: Json = False) -> None:
    """Resume functions: workers claim their tasks again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        paused = {each.name for each in await task_queue.functions.paused()}
        for name in names:
            await task_queue.functions.resume(name)
            output.print_pause("function", name, is_paused=False, as_json=as_json)
            if name not in paused and not as_json:
                output.print_note(f"{name}: this function was not paused")

    with_queue(url, work, creates=True)
