"""The history of runs over a range, and what a pool stores of its runs."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

import pytest

from omniq import AsyncTaskQueue, task
from omniq.errors import InvalidValue
from omniq.models import Task
from omniq.operations.run_history import RANGES, known_names, range_of, run_history
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts, percentile
from omniq.testing.builders import a_result, an_error
from omniq.worker.run_recorder import RunRecorder


async def _store(storage, clock, ago, *, func="shop.say", queue="mail", **counts):
    second = int(clock.now().timestamp()) - ago
    one = RunCounts(**counts)
    line = FunctionCounts(func, queue, RunCounts(**counts))
    await storage.add_run_counts([PeriodCounts(second - second % 60, one, [line])])


async def test_each_point_of_a_range_has_the_runs_of_its_time(storage, clock):
    await _store(storage, clock, 300, succeeded=8, retried=2, run=[0, 0, 10])
    history = await run_history(storage, RANGES["15m"])

    assert len(history.points) == 15
    assert [each.figures.runs for each in history.points if each.figures.runs] == [10]
    assert (history.total.succeeded, history.total.errors) == (8, 2)
    assert history.total.error_share == 0.2
    assert history.total.run_p50 is not None
    assert 0.0025 < history.total.run_p50 <= 0.005


@pytest.mark.parametrize("name", RANGES)
async def test_every_range_has_what_was_stored_in_it(storage, clock, name):
    await _store(storage, clock, 600, succeeded=1)
    await storage.merge_run_counts()
    clock.advance(60)

    for chosen in ({}, {"function": "shop.say"}, {"queue": "mail"}, {"parts": True}):
        history = await run_history(storage, RANGES[name], **chosen)
        assert history.total.succeeded == 1
        assert sum(each.figures.succeeded for each in history.points) == 1
    assert (await run_history(storage, RANGES[name], function="shop.other")).total.runs == 0


async def test_the_parts_are_those_of_the_chosen_function_or_queue(storage, clock):
    await _store(storage, clock, 240, succeeded=1)
    await _store(storage, clock, 300, succeeded=2, queue="web")
    await _store(storage, clock, 360, failed=4, func="shop.other")
    everything = await run_history(storage, RANGES["1h"], parts=True, workers=True)
    of_function = await run_history(storage, RANGES["1h"], function="shop.say", parts=True)

    assert {name: each.runs for name, each in everything.functions.items()} == {
        "shop.other": 4,
        "shop.say": 3,
    }
    assert {name: each.runs for name, each in everything.queues.items()} == {"mail": 5, "web": 2}
    assert list(everything.workers) == [storage.owner]
    assert {name: each.runs for name, each in of_function.queues.items()} == {"mail": 1, "web": 2}
    assert await known_names(storage) == (["shop.other", "shop.say"], ["mail", "web"])


@pytest.mark.parametrize("name", ["15m", "1h", "6h", "24h"])
async def test_the_parts_are_the_same_by_the_hour_as_by_the_minute(storage, clock, name):
    for ago in range(120, RANGES[name].seconds + 7_200, 180):
        await _store(storage, clock, ago, succeeded=ago % 7, failed=1, run=[0, ago % 7], wait=[1])
        if ago % 7 < 3:
            await _store(
                storage, clock, ago, func="shop.other", queue="web", retried=2, seconds=0.5
            )
        await storage.merge_run_counts()
    by_hour = await run_history(storage, RANGES[name], parts=True)
    by_minute = await run_history(storage, RANGES[name], parts=True, workers=True)

    assert len(by_hour.functions) == 2
    assert by_hour.functions == by_minute.functions
    assert by_hour.queues == by_minute.queues
    assert by_hour.points == by_minute.points


def test_an_unknown_range_is_refused_with_the_known_ones():
    with pytest.raises(InvalidValue, match="15m, 1h"):
        range_of("2y")


def test_percentiles_are_within_the_range_of_the_right_run():
    counts = RunCounts()
    for number in range(1, 101):
        counts.observe(0.0, number / 100)

    for fraction, value in ((0.5, 0.5), (0.95, 0.95), (0.99, 0.99)):
        found = percentile(counts.run, fraction)
        assert found is not None
        assert abs(found - value) <= 0.05


def test_all_outcomes_are_counted_however_many_runs_there_are(clock):
    recorder = RunRecorder(clock)
    ran = Task(id="a", func_path="shop.say", started_at=clock.now(), created_at=clock.now())
    for number in range(10_000):
        line = recorder.lines.get(("shop.say", "default"))
        if number % 100 == 99:
            recorder.ran(ran, 0.1, Retried("a", 1, an_error(), clock.now()))
        elif line is not None and line.left:
            line.left -= 1
        else:
            recorder.ran(ran, 0.1, Succeeded("a", 1, a_result(ran)))
    recorder.ran(ran, 0.1, Failed("a", 1, an_error()))
    recorder.end_minute()
    (minute,) = recorder._held

    assert (minute.total.succeeded, minute.total.retried, minute.total.failed) == (9_900, 100, 1)
    assert abs(sum(minute.total.run) - 10_001) <= 32


@task
async def fine() -> None:
    """Succeeds."""


@task(max_retries=0)
async def broken() -> None:
    """Fails."""
    raise ValueError("broken")


async def test_a_pool_stores_how_its_runs_ended():
    async with AsyncTaskQueue("memory://") as queue:
        await queue.enqueue_many(fine, [()] * 20)
        await queue.options(queue="mail").enqueue(broken)
        async with queue.worker(concurrency=4) as pool:
            await pool.run_until_empty()
        now = queue.storage.clock.now()
        # In full seconds: this minute may have begun in this second.
        periods = await queue.storage.run_counts(
            now - timedelta(days=1), now + timedelta(seconds=1)
        )
        (ended,) = await queue.storage.ended_workers()

        lines: dict[tuple[str, str], RunCounts] = defaultdict(RunCounts)
        for line in (line for period in periods for line in period.functions):
            lines[line.func_path.rpartition(".")[2], line.queue].add(line.counts)
        assert lines["fine", "default"].succeeded == 20
        assert lines["broken", "mail"].failed == 1
        assert ended.why == ""
