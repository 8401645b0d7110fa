"""`omniq limits`: the running limits and rate limits of a storage."""

from __future__ import annotations

from omniq.cli import output
from omniq.cli.options import Json, Url
from omniq.cli.parsing import format_duration, relative_time
from omniq.cli.queue_session import with_queue
from omniq.operations.limits import LimitInfo
from omniq.queue.async_queue import AsyncTaskQueue


def limits(url: Url = None, as_json: Json = False) -> None:
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
                output.text("full", "yellow") if limit.full else output.text("open"),
                relative_time(limit.opens_at, now),
            )
            for limit in found
        ]
        columns = ("limit", ">running", ">started", ">waiting", "state", "opens")
        output.show(output.Listing(columns, rows))

    with_queue(url, work)


def _is_running(limit: LimitInfo) -> bool:
    return bool(limit.running) or limit.max_running is not None


def _rate(limit: LimitInfo) -> str:
    if limit.rate is None or limit.per is None:
        return f"{limit.started}" if limit.started else ""
    return f"{limit.started}/{limit.rate} in {format_duration(limit.per)}"
