"""`omniq limits`: list the running limits and rate limits of a storage, change and hold them."""

from __future__ import annotations

from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Argument, Group, Option
from omniq.cli.options import Json, PauseReason, PauseSpan, Url
from omniq.cli.parsing import format_duration, parse_duration, relative_time
from omniq.cli.queue_session import with_queue
from omniq.operations.limits import LimitInfo
from omniq.queue.async_queue import AsyncTaskQueue

app = Group(
    "limits", "List the limits that all workers share; change, reset, hold and release them."
)

_UNKNOWN = "no task that runs, and none of the newest 1,000 that wait, has this limit; omniq limits lists those in use"

Keys = Annotated[list[str], Argument(metavar="KEY", help="Keys of limits.")]


@app.command("list")
def list_(url: Url = None, as_json: Json = False) -> None:
    """List the limits that all workers share, with the tasks that hold them and wait for them."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await task_queue.limits.list()
        if as_json:
            for limit in found:
                output.print_json(limit)
            return
        if not found:
            output.print_note("no task has named a limit")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                limit.key,
                f"{len(limit.running)}/{limit.max_running or '?'}" if _is_running(limit) else "",
                _rate(limit),
                limit.waiting,
                _state(limit),
                relative_time(limit.opens_at, now),
            )
            for limit in found
        ]
        columns = ("limit", ">running", ">started", ">waiting", "state", "opens")
        output.show(output.Listing(columns, rows))

    with_queue(url, work)


@app.command("set")
def set_(
    key: Annotated[str, Argument(metavar="KEY", help="Key of a limit.")],
    url: Url = None,
    max_running: Annotated[
        int | None, Option("--max-running", metavar="N", help="How many of its tasks may run.")
    ] = None,
    rate: Annotated[
        str | None, Option("--rate", metavar="RATE", help="How many may start, such as 100/5m.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Give a limit other numbers than its tasks say, for all workers, until it is reset. Running tasks continue."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        is_known = await task_queue.limits.set(key, max_running=max_running, rate=rate)
        _print(key, "changed", as_json, "" if is_known else _UNKNOWN)

    with_queue(url, work, creates=True)


@app.command()
def reset(keys: Keys, url: Url = None, as_json: Json = False) -> None:
    """Have limits admit what their tasks say again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for key in keys:
            was_changed = await task_queue.limits.reset(key)
            _print(key, "reset", as_json, "" if was_changed else "this limit was not changed")

    with_queue(url, work)


@app.command()
def hold(
    keys: Keys,
    url: Url = None,
    reason: PauseReason = "",
    span: PauseSpan = None,
    as_json: Json = False,
) -> None:
    """Have limits admit no task until they are released. Running tasks continue."""
    until = parse_duration("--for", span)

    async def work(task_queue: AsyncTaskQueue) -> None:
        for key in keys:
            is_known = await task_queue.limits.hold(key, reason=reason, until=until)
            _print(key, "held", as_json, "" if is_known else _UNKNOWN)

    with_queue(url, work, creates=True)


@app.command()
def release(keys: Keys, url: Url = None, as_json: Json = False) -> None:
    """Have limits that are held admit tasks again."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        for key in keys:
            was_held = await task_queue.limits.release(key)
            _print(key, "released", as_json, "" if was_held else "this limit was not held")

    with_queue(url, work)


def _print(key: str, what: str, as_json: bool, note: str) -> None:
    if as_json:
        output.print_json({"limit": key, what: True})
        return
    output.print_line(f"{what}: {key}")
    if note:
        output.print_note(f"{key}: {note}")


def _state(limit: LimitInfo) -> output.Cell:
    if limit.is_held:
        return output.text("held", "yellow")
    return output.text("full", "yellow") if limit.full else output.text("open")


def _is_running(limit: LimitInfo) -> bool:
    return bool(limit.running) or limit.max_running is not None


def _rate(limit: LimitInfo) -> str:
    if limit.rate is None or limit.per is None:
        return f"{limit.started}" if limit.started else ""
    return f"{limit.started}/{limit.rate} in {format_duration(limit.per)}"
