"""`omniq stats`: queues, rates, workers and failures, once or live."""

from __future__ import annotations

from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.live_view import Interval, Watch, is_screen, live, stream
from omniq.cli.options import Func, Json, Queue, Url
from omniq.cli.parsing import format_duration, format_instant, letter_line, relative_time
from omniq.cli.queue_session import with_queue
from omniq.cli.workers import state_of
from omniq.errors import InvalidValue
from omniq.models import TaskStatus
from omniq.operations.overview import Monitor, Overview, Percentiles
from omniq.operations.run_history import (
    RANGES,
    History,
    RunFigures,
    TimeRange,
    range_of,
    run_history,
)
from omniq.queue.async_queue import AsyncTaskQueue

Range = Annotated[
    str | None,
    Option("--range", metavar="RANGE", help=f"Runs of a time range: {', '.join(RANGES)}."),
]


def stats(
    url: Url = None,
    span: Range = None,
    func: Func = None,
    queue: Queue = None,
    watch: Watch = False,
    interval: Interval = 1.0,
    as_json: Json = False,
) -> None:
    """Show queues, rates, latencies, workers and failures.

    With `--range` it shows how runs ended in that time.
    Rates need two samples: only `--watch` shows them. With `--json` it prints one line per sample.
    """
    if span is not None:
        _show_history(url, range_of(span), func, queue, as_json)
        return
    if func is not None or queue is not None:
        raise InvalidValue("--func and --queue need --range, such as --range 1h")

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


def _show_history(
    url: str | None, span: TimeRange, function: str | None, queue: str | None, as_json: bool
) -> None:
    async def work(task_queue: AsyncTaskQueue) -> None:
        history = await run_history(
            task_queue.storage, span, function=function, queue=queue, parts=True
        )
        if as_json:
            output.print_json(history)
        else:
            output.show(*history_page(history, span))

    with_queue(url, work)


def history_page(history: History, span: TimeRange) -> list[output.Renderable]:
    """The figures of a range: in total, by function and by queue."""
    total = history.total
    pairs: list[tuple[str, output.Cell]] = [
        ("range", f"last {span.text}, until {format_instant(history.until)}"),
        (
            "runs",
            f"{total.succeeded:,} succeeded   {total.retried:,} retried   {total.failed:,} failed   "
            f"{total.stopped:,} stopped",
        ),
        ("wait", _spread(total.wait_p50, total.wait_p95, total.wait_p99)),
        ("run", _spread(total.run_p50, total.run_p95, total.run_p99)),
    ]
    parts: list[output.Renderable] = [output.key_values(pairs)]
    for name, found in (("function", history.functions), ("queue", history.queues)):
        if found:
            parts += ["", _figures(name, found)]
    return parts


def _figures(name: str, found: dict[str, RunFigures]) -> output.Renderable:
    rows = [
        (
            each,
            f"{figures.runs:,}",
            output.text(f"{figures.errors:,}", "red" if figures.errors else ""),
            _seconds(figures.wait_p95),
            _seconds(figures.run_p50),
            _seconds(figures.run_p95),
        )
        for each, figures in sorted(found.items(), key=lambda pair: -pair[1].runs)
    ]
    return output.Listing((name, ">runs", ">failed", ">wait p95", ">run p50", ">run p95"), rows)


def _spread(*values: float | None) -> str:
    names = ("median", "p95", "p99")
    return "   ".join(
        f"{_seconds(value)} {name}" for name, value in zip(names, values, strict=True)
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_duration(value)


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
                f"{rates.retried:,.1f} retried   {rates.failed:,.1f} failed",
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
