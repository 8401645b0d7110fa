"""`omniq flows`: list flows, show one as a graph, cancel and retry it; send the events that tasks wait for."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from omniq.cli import output
from omniq.cli.command import Argument, Group, Option
from omniq.cli.options import Json, Url
from omniq.cli.parsing import relative_time
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.errors import InvalidTask, TaskNotFound
from omniq.operations.flow_view import (
    NodeInfo,
    flow_json,
    list_flows,
    list_open_events,
    show_flow,
)
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.worker.process import console

app = Group("flows", "List, show, cancel and retry flows; send the events that tasks wait for.")

_BAR = 10

FlowId = Annotated[str, Argument(metavar="FLOW", help="The id of a flow.")]


@app.command("list")
def list_(
    url: Url = None,
    as_json: Json = False,
    limit: Annotated[int, Option("--limit", help="How many, at most.")] = 50,
) -> None:
    """List flows, newest first, with the number of their nodes."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await list_flows(task_queue.storage, limit)
        if as_json:
            for flow in found:
                output.print_json(flow)
            return
        if not found:
            output.print_note("no flow was started")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                flow.id,
                output.status_text(flow.status),
                flow.name,
                flow.nodes,
                flow.live,
                flow.failed,
                relative_time(flow.started_at, now),
            )
            for flow in found
        ]
        columns = ("flow", "status", "name", ">nodes", ">live", ">failed", "started")
        output.show(output.Listing(columns, rows, has_task_ids=True))

    with_queue(url, work)


@app.command()
def show(flow: FlowId, url: Url = None, as_json: Json = False) -> None:
    """Show the nodes of a flow in layers, and what each waits for."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        try:
            info, nodes = await show_flow(task_queue.storage, flow)
        except TaskNotFound:
            raise _not_found(flow) from None
        if as_json:
            output.print_json(flow_json(info, nodes))
            return
        name = f" {info.name}" if info.name else ""
        output.print_line(f"{info.id}{name}: {info.status}")
        rows = [
            (
                "  " * node.layer + node.name,
                output.status_text(node.status),
                _members(node),
                ", ".join(node.after),
            )
            for node in nodes
        ]
        output.show(output.Listing(("node", "status", "members", "after"), rows))

    with_queue(url, work)


def _members(node: NodeInfo) -> str:
    """The members of a map on one line: their number and progress."""
    total = sum(node.counts.values())
    if not total:
        return ""
    done = node.counts.get("success", 0)
    bar = "█" * (done * _BAR // total)
    others = [
        f"{count:,} {status}"
        for status, count in sorted(node.counts.items())
        if status != "success"
    ]
    return " · ".join((f"×{total:,} {bar:░<{_BAR}} {done:,} done", *others))


@app.command()
def cancel(flow: FlowId, url: Url = None, as_json: Json = False) -> None:
    """Cancel a flow and all of its nodes."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        if not await task_queue.flow(flow).cancel():
            raise CommandFailed(f"flow {flow}: it has ended, or does not exist", console.NOT_FOUND)
        if as_json:
            output.print_json({"flow": flow, "cancelled": True})
        else:
            output.print_line(f"cancelled: {flow}")

    with_queue(url, work)


@app.command()
def retry(
    flow: FlowId,
    url: Url = None,
    as_json: Json = False,
    from_: Annotated[
        str | None,
        Option(
            "--from", metavar="NODE", help="Run this node and all nodes that depend on it again."
        ),
    ] = None,
) -> None:
    """Run the nodes of a flow again that did not succeed."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        try:
            is_retried = await task_queue.flow(flow).retry(from_)
        except TaskNotFound:
            raise _not_found(flow) from None
        except InvalidTask as error:
            raise CommandFailed(str(error)) from None
        if as_json:
            output.print_json({"flow": flow, "retried": is_retried})
        else:
            output.print_line(
                f"retried: {flow}" if is_retried else f"{flow} has already been retried"
            )

    with_queue(url, work)


@app.command()
def waits(url: Url = None, as_json: Json = False) -> None:
    """List the events that tasks wait for, with their prompts."""

    async def work(task_queue: AsyncTaskQueue) -> None:
        found = await list_open_events(task_queue.storage)
        if as_json:
            for event in found:
                output.print_json(event)
            return
        if not found:
            output.print_note("no task waits for an event")
            return
        now = task_queue.storage.clock.now()
        rows = [
            (
                event.task_id or event.id,
                event.name,
                event.type or "",
                relative_time(event.expires, now),
                output.text(event.prompt),
            )
            for event in found
        ]
        columns = ("task", "event", "type", "until", "prompt")
        output.show(output.Listing(columns, rows, has_task_ids=True))

    with_queue(url, work)


@app.command()
def send(
    target: Annotated[
        str,
        Argument(
            metavar="TASK",
            help="The id of the task or flow; - for an event that belongs to no task.",
        ),
    ],
    event: Annotated[str, Argument(metavar="EVENT", help="The name of the event.")],
    value: Annotated[str, Argument(metavar="JSON", help="The value; default: null.")] = "null",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Send an event to the task that waits for it. The first value counts."""
    try:
        decoded: Any = msgspec.json.decode(value)
    except msgspec.DecodeError:
        raise CommandFailed(f"{value!r} is not JSON; text needs quotes: '\"yes\"'") from None

    async def work(task_queue: AsyncTaskQueue) -> None:
        to = None if target == "-" else target
        try:
            is_first = await task_queue.send_event(event, decoded, to=to)
        except TaskNotFound:
            raise CommandFailed(f"task {target}: no record of it", console.NOT_FOUND) from None
        except InvalidTask as error:
            raise CommandFailed(str(error)) from None
        if as_json:
            output.print_json({"task": to, "event": event, "sent": is_first})
        elif is_first:
            output.print_line(f"sent: {event}")
        else:
            output.print_line(f"{event} already has a value, or the task has ended")

    with_queue(url, work)


def _not_found(flow: str) -> CommandFailed:
    return CommandFailed(f"flow {flow}: no record of it; omniq flows lists them", console.NOT_FOUND)
