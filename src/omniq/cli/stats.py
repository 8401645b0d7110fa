"""`omniq stats`: queues, rates, workers and failures, once or live."""

from __future__ import annotations

from omniq.cli import output
from omniq.cli.live_view import Interval, Watch, is_screen, live, stream
from omniq.cli.options import Json, Url
from omniq.cli.parsing import format_duration, format_instant, letter_line, relative_time
from omniq.cli.queue_session import with_queue
from omniq.cli.workers import state_of
from omniq.models import TaskStatus
from omniq.operations.overview import Monitor, Overview, Percentiles
from omniq.queue.async_queue import AsyncTaskQueue


def stats(
    url: Url = None,
    watch: Watch = False,
    interval: Interval = 1.0,
    as_json: Json = False,
) -> None:
    """Show queues, rates, latencies, workers and failures.

    Rates need two samples: only `--watch` shows them. With `--json` it prints one line per sample.
    """

    async def work(task_queue: AsyncTaskQueue) -> None:
        clock, monitor = task_queue.storage.clock, Monitor(task_queue.storage)

        async def live_page() -> list[output.Renderable]:
            return page(await monitor.overview(), is_live=True)

        async def print_sample() -> None:
            output.print_json(await monitor.overview())

        if watch and as_json:
            await stream(clock, interval, print_sample)
        elif watch and is_screen():
            await live(clock, interval, live_page)
        elif as_json:
            await print_sample()
        else:
            output.show(*page(await monitor.overview()))

    with_queue(url, work)


def page(overview: Overview, *, is_live: bool = False) -> list[output.Renderable]:
    """The whole overview, for a terminal of any width."""
    parts: list[output.Renderable] = [_head(overview, is_live), "", _numbers(overview)]
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
    return parts


def _head(overview: Overview, is_live: bool) -> output.Renderable:
    how = "  q quits" if is_live else ""
    return output.text(f"omniq on {overview.storage}  {format_instant(overview.at)}{how}", "bold")


def _numbers(overview: Overview) -> output.Renderable:
    counts = output.Text.join(
        "   ",
        [
            output.Text.of(output.status_text(status), f" {overview.by_status[status]:,}")
            for status in TaskStatus
        ],
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


def _queues(overview: Overview) -> output.Renderable:
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


def _workers(overview: Overview) -> output.Renderable:
    rows = [
        (
            worker.id,
            f"{len(worker.running)}/{worker.concurrency or '?'}",
            state_of(worker),
            f"{worker.host}:{worker.pid}",
            ", ".join(worker.queues) or "all",
            relative_time(worker.last_heartbeat, overview.at),
        )
        for worker in overview.workers
    ]
    return output.Listing(("worker", ">busy", "state", "process", "queues", "heartbeat"), rows)


def _breakers(overview: Overview) -> output.Renderable:
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


def _unrunnable(overview: Overview) -> output.Renderable:
    rows = [
        (each.func_path, f"{each.waiting:,}", output.text("no live worker can run it", "red"))
        for each in overview.unrunnable
    ]
    return output.Listing(("function", ">waiting", "why"), rows)


def _failures(overview: Overview) -> output.Renderable:
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
