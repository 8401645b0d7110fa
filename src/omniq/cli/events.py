"""`omniq events`: what happens in a fleet, as it happens."""

from __future__ import annotations

from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.live_view import stream
from omniq.cli.options import Json, Url
from omniq.cli.parsing import format_duration, parse_duration
from omniq.cli.queue_session import with_queue
from omniq.errors import StorageError
from omniq.operations.event_tail import EventTail, FleetEvent
from omniq.queue.async_queue import AsyncTaskQueue

_COLOURS = {
    "task.succeeded": "green",
    "task.started": "cyan",
    "task.retried": "magenta",
    "task.failed": "red",
    "task.cancelled": "dim",
    "worker.stalled": "red",
    "breaker.opened": "red",
    "breaker.closed": "green",
    "events.missed": "yellow",
}


def events(
    url: Url = None,
    queue: Annotated[
        str | None, Option("--queue", "-q", help="Only tasks of this queue.", complete="queue")
    ] = None,
    func: Annotated[
        str | None,
        Option(
            "--func",
            "-f",
            help="Only tasks of this function: module.function.",
            complete="function",
        ),
    ] = None,
    interval: Annotated[
        float, Option("--interval", "-i", min=0.1, metavar="S", help="Seconds between polls.")
    ] = 1.0,
    duration: Annotated[
        str | None,
        Option("--duration", "-d", metavar="SPAN", help="End after this time, such as 10m."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what happens to tasks, workers, queues and breakers, as it happens.

    Ends with q or Ctrl-C. The command polls the storage, so it costs workers nothing. Each poll reads
    the 200 newest tasks, up to 200 running ones, and the workers. A line `events.missed` says that more
    tasks were enqueued between two polls. An older task that starts and ends between two polls is not
    shown, and of several runs between two polls only the last is; the log of the workers has all of them.
    """
    seconds = parse_duration("--duration", duration)

    async def work(task_queue: AsyncTaskQueue) -> None:
        tail = EventTail(task_queue.storage, queue=queue, func_path=func)

        async def turn() -> None:
            try:
                found = await tail.poll()
            except StorageError as error:
                # The stream survives a restart of the server.
                output.print_note(f"the storage does not answer, trying again: {error}")
                return
            for event in found:
                output.print_json(event) if as_json else output.show(_line(event))

        await stream(task_queue.storage.clock, interval, turn, seconds=seconds)

    with_queue(url, work)


def _line(event: FleetEvent) -> output.Text:
    details = [
        f"attempt {event.attempt}" if event.attempt else "",
        format_duration(event.seconds) if event.seconds is not None else "",
        event.error,
        event.reason,
        f"queue {event.queue}" if event.event == "task.enqueued" else "",
        f"on {event.worker}" if event.event == "task.started" and event.worker else "",
    ]
    words = [event.func_path, event.id, ", ".join(detail for detail in details if detail)]
    return output.Text.of(
        f"{event.at:%H:%M:%SZ} ",
        output.text(f"{event.event:<15}", _COLOURS.get(event.event, "")),
        *(output.Text.of(" ", output.text(word)) for word in words if word),
    )
