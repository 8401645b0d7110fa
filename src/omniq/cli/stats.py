"""`omniq stats`: queues, rates, workers and failures, once or live."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from omniq.cli import output
from omniq.cli.keyboard import quit_key
from omniq.cli.options import Json, Url
from omniq.cli.parsing import format_duration, format_instant, letter_line, relative_time
from omniq.cli.queue_session import with_queue
from omniq.errors import StorageError
from omniq.models import TaskStatus
from omniq.operations.overview import Monitor, Overview, Percentiles
from omniq.queue.async_queue import AsyncTaskQueue

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


def stats(
    url: Url = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Refresh until q or Ctrl-C; in a pipe, print once."),
    ] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", "-i", min=0.1, metavar="S", help="Seconds between refreshes."),
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Show queues, rates, latencies, workers and failures.

    Rates need two samples: only `--watch` shows them. With `--json` it prints one line per sample.
    """

    async def work(task_queue: AsyncTaskQueue) -> None:
        monitor = Monitor(task_queue.storage)
        if watch and (as_json or sys.stdout.isatty()):
            with quit_key() as pressed:
                await (_stream if as_json else _live)(task_queue, monitor, interval, pressed)
        elif as_json:
            output.print_json(await monitor.overview())
        else:
            output.print_rich(page(await monitor.overview()))

    with_queue(url, work)


async def _stream(
    task_queue: AsyncTaskQueue, monitor: Monitor, interval: float, pressed: asyncio.Future[None]
) -> None:
    while not pressed.done():
        output.print_json(await monitor.overview())
        sys.stdout.flush()
        await task_queue.storage.clock.wait(pressed, interval)


async def _live(
    task_queue: AsyncTaskQueue, monitor: Monitor, interval: float, pressed: asyncio.Future[None]
) -> None:
    from rich.live import Live

    with Live(console=output.terminal(), screen=True, auto_refresh=False) as live:
        while not pressed.done():
            try:
                shown: RenderableType = page(await monitor.overview(), is_live=True)
            except StorageError as error:
                # The view survives a restart of the server.
                shown = output.block(f"the storage does not answer, trying again: {error}")
            live.update(shown, refresh=True)
            await task_queue.storage.clock.wait(pressed, interval)


def page(overview: Overview, *, is_live: bool = False) -> Group:
    """The whole overview, for a terminal of any width."""
    from rich.console import Group

    parts: list[RenderableType] = [_head(overview, is_live), "", _numbers(overview)]
    if overview.queues:
        parts += ["", _queues(overview)]
    if overview.workers:
        parts += ["", _workers(overview)]
    if any(breaker.state != "closed" for breaker in overview.breakers):
        parts += ["", _breakers(overview)]
    if overview.unrunnable:
        parts += ["", _unrunnable(overview)]
    if overview.failures:
        parts += ["", _failures(overview)]
    return Group(*parts)


def _head(overview: Overview, is_live: bool) -> RenderableType:
    how = "  q quits" if is_live else ""
    return output.text(f"omniq on {overview.storage}  {format_instant(overview.at)}{how}", "bold")


def _numbers(overview: Overview) -> RenderableType:
    from rich.text import Text

    counts = Text("   ").join(
        Text.assemble(output.status_text(status), f" {overview.by_status[status]:,}")
        for status in TaskStatus
    )
    pairs: list[tuple[str, output.Cell]] = [
        ("tasks", counts),
        ("dead letters", output.text(f"{overview.dead:,}", "red" if overview.dead else "")),
        (
            "oldest due",
            format_duration(overview.oldest_due_age) if overview.oldest_due_age else "none",
        ),
    ]
    if overview.rates is not None:
        rates = overview.rates
        pairs.append(
            (
                "a second",
                f"{rates.enqueued:,.1f} enqueued   {rates.finished:,.1f} finished   "
                f"{rates.failed:,.1f} failed",
            )
        )
    pairs += [("wait", _percentiles(overview.wait)), ("run", _percentiles(overview.run))]
    return output.key_values(pairs)


def _percentiles(spread: Percentiles | None) -> str:
    if spread is None:
        return ""
    return f"{format_duration(spread.median)} median   {format_duration(spread.p95)} p95   (newest {spread.count})"


def _queues(overview: Overview) -> RenderableType:
    rows = [
        (
            line.name,
            f"{line.waiting:,}",
            f"{line.running:,}",
            output.text("paused", "yellow") if line.paused else output.text("open"),
            output.text(line.workers, "" if line.workers else "red"),
        )
        for line in overview.queues
    ]
    return output.Listing(("queue", ">waiting", ">running", "state", ">workers"), rows)


def _workers(overview: Overview) -> RenderableType:
    rows = [
        (
            worker.id,
            f"{len(worker.running)}/{worker.concurrency or '?'}",
            output.text("stalled", "red") if worker.stalled else output.text("alive", "green"),
            f"{worker.host}:{worker.pid}",
            ", ".join(worker.queues) or "all",
            relative_time(worker.last_heartbeat, overview.at),
        )
        for worker in overview.workers
    ]
    return output.Listing(("worker", ">busy", "state", "process", "queues", "heartbeat"), rows)


def _breakers(overview: Overview) -> RenderableType:
    rows = [
        (
            breaker.name,
            output.text(breaker.state, "red"),
            relative_time(breaker.opened_at, overview.at),
            breaker.reason,
        )
        for breaker in overview.breakers
        if breaker.state != "closed"
    ]
    return output.Listing(("breaker", "state", "opened", "because of"), rows)


def _unrunnable(overview: Overview) -> RenderableType:
    rows = [
        (each.func_path, f"{each.waiting:,}", output.text("no live worker can run it", "red"))
        for each in overview.unrunnable
    ]
    return output.Listing(("function", ">waiting", "why"), rows)


def _failures(overview: Overview) -> RenderableType:
    rows = [
        (
            letter.task_id,
            letter.func_path,
            letter.failure_reason,
            relative_time(letter.last_failure, overview.at),
            letter_line(letter),
        )
        for letter in overview.failures
    ]
    return output.Listing(("newest failures", "function", "reason", "when", "error"), rows)
