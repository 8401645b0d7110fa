"""The overview of a storage, and the details of one task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from omniq.errors import TaskNotFound
from omniq.models import Runnable, Task, TaskStatus
from omniq.operations.newest import newest_dead, newest_tasks
from omniq.operations.overview import Monitor, queue_summaries
from omniq.operations.task_detail import task_detail
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.text.to_json import plain


async def test_rates_need_two_samples(storage, worker, clock):
    other = await worker(concurrency=4)
    monitor = Monitor(storage)
    assert (await monitor.overview()).rates is None

    await storage.enqueue_many(some_tasks("abcd"))
    claimed = await other.reserve(4)
    clock.advance(2)
    ends = [Succeeded(task.id, task.token, a_result(task)) for task in claimed[:2]]
    await other.record([*ends, Failed(claimed[2].id, claimed[2].token, an_error())])
    await other.renew(concurrency=4, runs=(2, 1, 5))
    rates = (await monitor.overview()).rates

    assert rates is not None
    assert (rates.enqueued, rates.finished, rates.failed, rates.retried) == (2.0, 1.5, 0.5, 2.5)


async def test_rates_stay_right_when_as_many_results_expire_as_are_stored(storage, worker, clock):
    other = await worker(concurrency=1)
    monitor, rates = Monitor(storage), []
    for second in range(20):
        await storage.enqueue(a_task(f"t{second:02}", result_ttl=3))
        (task,) = await other.reserve(1)
        await other.record([Succeeded(task.id, task.token, a_result(task))])
        await other.renew(concurrency=1, runs=(second + 1, 0, 0))
        rates.append((await monitor.overview()).rates)
        clock.advance(1)

    assert rates[0] is None
    assert [round(rate.finished, 3) for rate in rates[1:] if rate] == [1.0] * 19
    assert [round(rate.enqueued, 3) for rate in rates[1:] if rate] == [1.0] * 19


async def test_a_worker_without_heartbeats_has_no_rate(storage, worker, clock):
    other = await worker(concurrency=1, lease=1000)
    monitor = Monitor(storage)
    await monitor.overview()
    clock.advance(2)
    await other.renew(concurrency=1, lease=1000, runs=(10, 0, 0))
    rates = (await monitor.overview()).rates
    assert rates is not None
    assert rates.finished == 5.0

    clock.advance(100)
    overview = await monitor.overview()
    assert [(each.stalled, each.late) for each in overview.workers] == [(True, True)]
    assert overview.rates is not None
    assert overview.rates.finished == 0.0


async def test_a_queue_without_tasks_stays_listed(storage, worker, clock):
    other = await worker(concurrency=1)
    line = FunctionCounts("shop.say", "mail", RunCounts(succeeded=1))
    start = int(clock.now().timestamp()) // 60 * 60
    await other.add_run_counts([PeriodCounts(start, RunCounts(succeeded=1), [line])])
    clock.advance(86_400)

    assert [each.name for each in await queue_summaries(storage)] == ["mail"]
    assert [each.name for each in (await Monitor(storage).overview()).queues] == ["mail"]


async def test_functions_that_no_live_worker_can_run_are_found(storage, worker, clock):
    await worker(lease=1000, runnable=Runnable(modules=("mail",)))
    await storage.enqueue_many(some_tasks("abc", func_path="shop.new"))
    await storage.enqueue(a_task("d", func_path="mail.send"))
    monitor = Monitor(storage)
    assert (await monitor.overview()).unrunnable == ()

    clock.advance(10)
    (found,) = (await monitor.overview()).unrunnable
    assert (found.func_path, found.waiting) == ("shop.new", 3)
    assert list(found.runs.values()) == ["mail"]


async def test_wait_and_run_are_measured_from_the_newest_tasks(storage, worker, clock):
    other = await worker(lease=100)
    await storage.enqueue(a_task("a"))
    clock.advance(3)
    (task,) = await other.reserve(1)
    clock.advance(5)
    result = a_result(task, started_at=task.started_at, finished_at=clock.now())
    await other.record([Succeeded("a", task.token, result)])
    overview = await Monitor(storage).overview()

    assert overview.wait is not None
    assert overview.run is not None
    assert (overview.wait.median, overview.run.median) == (3.0, 5.0)


async def test_queues_show_waiting_and_running_tasks_workers_and_pauses(storage, worker):
    other = await worker(queues=("mail",))
    await storage.enqueue_many([*some_tasks("ab", queue="mail"), a_task("c", queue="web")])
    await other.reserve(1, queues=("mail",))
    await storage.pause_queue("idle")

    lines = {line.name: line for line in await queue_summaries(storage)}
    assert list(lines) == ["idle", "mail", "web"]
    assert (lines["mail"].waiting, lines["mail"].running, lines["mail"].workers) == (1, 1, 1)
    assert (lines["web"].waiting, lines["web"].workers) == (1, 0)
    assert lines["idle"].paused


async def test_the_newest_tasks_come_first_however_many_are_older(storage, clock):
    for _ in range(30):
        await storage.enqueue(a_task(clock.new_id(), created_at=clock.now()))
        clock.advance(60)
    await storage.enqueue(a_task("my-own-id", created_at=clock.now()))

    newest = await newest_tasks(storage, 5)
    assert newest[0].id == "my-own-id"
    assert [task.created_at for task in newest] == sorted(
        (task.created_at for task in newest), reverse=True
    )
    assert len(await newest_tasks(storage, 100)) == 31


async def test_the_newest_tasks_are_found_in_few_pages_among_many(storage, clock, monkeypatch):
    def burst(count: int) -> list[Task]:
        return [a_task(clock.new_id(), created_at=clock.now()) for _ in range(count)]

    await storage.enqueue_many(burst(3000))
    clock.advance(3600)
    await storage.enqueue_many(burst(3000))
    clock.advance(0.5)
    newest = burst(5)
    await storage.enqueue_many(newest)
    clock.advance(timedelta(days=3))
    scans = 0
    scan = storage._engine.page

    async def counted(query):
        nonlocal scans
        scans += 1
        return await scan(query)

    monkeypatch.setattr(storage._engine, "page", counted)
    found = await newest_tasks(storage, 5)

    assert [task.id for task in found] == [task.id for task in reversed(newest)]
    assert scans == 1


async def test_the_latest_failure_comes_first(storage, worker, clock):
    other = await worker(concurrency=3, lease=100)
    await storage.enqueue_many(some_tasks("abc"))
    for task in await other.reserve(3):
        clock.advance(1)
        await other.record([Failed(task.id, task.token, an_error())])

    assert [letter.task_id for letter in await newest_dead(storage, 2)] == ["c", "b"]


async def test_the_detail_of_a_task_has_its_whole_timeline(storage, worker, clock):
    other = await worker(lease=1000)
    await storage.enqueue(a_task("a", created_at=clock.now()))
    (task,) = await other.reserve(1)
    clock.advance(1)
    await other.record([Retried("a", task.token, an_error("first"), clock.now())])
    clock.advance(1)
    (task,) = await other.reserve(1)
    clock.advance(1)
    result = a_result(task, 42, started_at=task.started_at, finished_at=clock.now())
    await other.record([Succeeded("a", task.token, result)])

    detail = await task_detail(storage, "a")
    assert [moment.what for moment in detail.timeline] == [
        "enqueued",
        "started",
        "failed",
        "started",
        "success",
    ]
    assert [attempt.error.message for attempt in detail.attempts if attempt.error] == ["first"]
    assert detail.result is not None
    assert detail.result.result == 42


async def test_the_detail_of_a_dead_letter_exists_after_its_record_has_expired(
    storage, worker, clock
):
    other = await worker(lease=1000)
    await storage.enqueue(a_task("a", args=(1,), result_ttl=10))
    (task,) = await other.reserve(1)
    await other.record([Failed("a", task.token, an_error("last error"))])
    clock.advance(20)

    detail = await task_detail(storage, "a")
    assert detail.task.args == (1,)
    assert detail.task.status is TaskStatus.FAILED
    assert detail.attempts[0].error is not None
    with pytest.raises(TaskNotFound):
        await task_detail(storage, "missing")


def test_a_record_has_all_its_fields_and_only_plain_values():
    task = a_task(
        "a", args=(b"raw", {1, 2}, datetime(2026, 1, 1, tzinfo=UTC)), kwargs={"span": timedelta(1)}
    )
    record = plain(task)

    assert record.keys() == set(task.__struct_fields__) | {"failures"}
    assert record["args"] == ["cmF3", [1, 2], "2026-01-01T00:00:00+00:00"]
    assert record["kwargs"] == {"span": 86400.0}
    assert record["status"] == "pending"


def test_a_value_without_a_repr_is_shown_by_its_type():
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert plain([Odd(), float("nan"), "\ud800"]) == ["<Odd>", "nan", "\\ud800"]
