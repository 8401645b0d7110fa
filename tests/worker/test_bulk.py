"""`queue.bulk` changes all tasks that match, once each, and can be stopped and repeated."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from omniq import AsyncTaskQueue, BulkReport, InvalidTask, InvalidValue, TaskQueue, task
from omniq.models import TaskStatus
from omniq.operations import bulk_selection
from omniq.outcomes import Failed
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_task, an_error
from omniq.testing.clock import ManualClock


@task
def charge(order: int, region: str = "eu") -> None:
    """One of two functions."""


@task(queue="mail")
def send(to: str) -> None:
    """The other one, in another queue."""


@pytest.fixture
def steps_of_two(monkeypatch) -> None:
    monkeypatch.setattr(bulk_selection, "STEP", 2)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def clocked(clock):
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        yield queue


async def charges(queue: AsyncTaskQueue, count: int) -> list[str]:
    return [handle.id for handle in await queue.enqueue_many(charge, range(count))]


async def fail_all(queue: AsyncTaskQueue, message: str = "boom") -> None:
    for each in await queue.storage.reserve(100):
        await queue.storage.record([Failed(each.id, each.token, an_error(message))])


async def status_of(queue: AsyncTaskQueue, task_id: str) -> TaskStatus:
    found = await queue.get_task(task_id)
    assert found is not None
    return found.status


async def test_a_filter_selects_what_is_cancelled(queue, steps_of_two):
    # Ids of two kinds: that of omniq, and those that callers choose, before and after it in order.
    chosen = [*await charges(queue, 3), "0-mine", "zz-mine"]
    for task_id in chosen[3:]:
        await queue.options(task_id=task_id).enqueue(charge, 7)
    other = await queue.enqueue(send, "ada")
    done = await queue.bulk.cancel(func_path=f"{__name__}.charge")

    assert (done.done, done.refused) == (5, {})
    assert {await status_of(queue, each) for each in chosen} == {TaskStatus.CANCELLED}
    assert await status_of(queue, other.id) is TaskStatus.PENDING


async def test_a_repeated_call_changes_nothing_twice(queue, steps_of_two):
    await charges(queue, 3)
    first = await queue.bulk.change(priority=5, to_queue="slow", all=True)
    again = await queue.bulk.change(priority=5, to_queue="slow", all=True)
    tasks = await queue.list_tasks()

    assert (first.done, again.done) == (3, 0)
    assert [(each.priority, each.queue) for each in tasks] == [(5, "slow")] * 3


async def test_dead_letters_that_match_are_retried_and_can_be_deleted(queue, steps_of_two):
    await charges(queue, 3)
    await fail_all(queue, "card refused")
    await queue.enqueue(send, "ada")
    await fail_all(queue, "no such mailbox")
    retried = await queue.bulk.retry(error="refused")
    deleted = await queue.bulk.delete(all=True)

    assert (retried.done, deleted.done) == (3, 1)
    assert await queue.dead.list() == []
    assert (await queue.stats()).by_status[TaskStatus.PENDING] == 3


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"search": "fn:charge arg.order:1"}, 1),
        ({"args": {"order": 1}}, 1),
        ({"args": {"order": 1}, "search": "arg.region:us"}, 0),
        ({"metadata": {"tenant": 7}}, 2),
        ({"queue": "mail"}, 1),
        ({"status": "pending", "func_path": f"{__name__}.charge"}, 3),
        ({"task_type": "billing"}, 2),
        ({"since": 30}, 2),
        ({"until": timedelta(seconds=30)}, 2),
    ],
)
async def test_each_filter_selects(clocked, clock, wanted: Any, count: int):
    await clocked.options(metadata={"tenant": 7}).enqueue(charge, order=1)
    await clocked.options(task_type="billing", metadata={"tenant": 7}).enqueue(charge, order=2)
    clock.advance(60)
    await clocked.options(task_type="billing").enqueue(charge, order=3)
    await clocked.enqueue(send, "ada")
    done = await clocked.bulk.cancel(**wanted)

    assert done.done == count


async def test_delayed_tasks_are_made_due_and_due_ones_are_left_alone(clocked, clock):
    await charges(clocked, 2)
    await clocked.options(delay=3600).enqueue(charge, 9)
    done = await clocked.bulk.run_now(all=True)
    later = await clocked.bulk.change(delay=60, all=True)

    assert (done.done, later.done) == (1, 3)
    assert {each.eta for each in await clocked.list_tasks()} == {
        clock.now() + timedelta(seconds=60)
    }


async def test_a_retry_by_reason_and_by_arguments(clocked):
    await charges(clocked, 3)
    await fail_all(clocked)

    assert (await clocked.bulk.retry(reason="unknown function")).done == 0
    assert (await clocked.bulk.retry(reason="exhausted", search="arg.0:2")).done == 1
    assert (await clocked.bulk.retry(func_path=f"{__name__}.charge")).done == 2


async def test_a_search_by_error_also_finds_dead_letters_whose_record_has_expired(clocked, clock):
    await charges(clocked, 2)
    await clocked.options(result_ttl=60).enqueue(charge, 9)
    await fail_all(clocked, "card refused")
    clock.advance(120)
    await clocked.storage.purge_expired()
    with_record = len(await clocked.list_tasks())
    done = await clocked.bulk.delete(error="refused")

    assert (with_record, done.done) == (2, 3)
    assert await clocked.dead.list() == []


async def test_a_change_can_be_stopped_between_two_steps_and_repeated(clocked, steps_of_two):
    await charges(clocked, 5)
    seen: list[int] = []

    def on_step(report: BulkReport) -> bool:
        seen.append(report.done)
        return report.done < 4

    first = await clocked.bulk.cancel(all=True, on_step=on_step)
    rest = await clocked.bulk.cancel(all=True)

    assert seen == [2, 4]
    assert (first.done, first.stopped, rest.done, rest.stopped) == (4, True, 1, False)


async def test_what_was_done_before_an_interruption_stays_and_is_not_done_again(
    clocked, steps_of_two
):
    await charges(clocked, 5)
    await fail_all(clocked)
    running: list[asyncio.Future[BulkReport]] = []

    def interrupt(report: BulkReport) -> None:
        running[0].cancel()

    running.append(asyncio.ensure_future(clocked.bulk.retry(all=True, on_step=interrupt)))
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    rest = await clocked.bulk.retry(all=True)

    assert 0 < rest.done < 5
    assert (await clocked.stats()).by_status[TaskStatus.PENDING] == 5


async def test_one_that_fails_again_meanwhile_is_not_retried_twice(clocked, steps_of_two):
    await charges(clocked, 4)
    await fail_all(clocked)
    failures: list[Any] = []

    def on_step(report: BulkReport) -> None:
        failures.append(asyncio.ensure_future(fail_all(clocked)))

    done = await clocked.bulk.retry(all=True, on_step=on_step)
    await asyncio.gather(*failures)

    assert done.done == 4


async def test_a_report_keeps_a_bounded_number_of_refusals(clocked):
    many = {f"t{number}": "no" for number in range(700)}
    report = BulkReport(1, many).plus(BulkReport(1, {f"u{key}": why for key, why in many.items()}))

    assert (report.done, len(report.refused), report.refused_count) == (2, 1_000, 1_400)


@pytest.mark.parametrize(
    "verb", ["cancel", "delete", "run_now", "retry", "change"], ids=lambda verb: verb
)
async def test_without_a_filter_all_tasks_are_changed_only_on_request(clocked, verb):
    await clocked.storage.enqueue(a_task("a"))
    options = {"priority": 3} if verb == "change" else {}
    for wanted in ({}, {"search": ""}, {"search": '""'}, {"func_path": None}):
        with pytest.raises(InvalidTask, match=r"give a filter, such as func_path=…, or all=True"):
            await getattr(clocked.bulk, verb)(**options, **wanted)

    assert (await clocked.get_task("a")).priority == 0
    assert await status_of(clocked, "a") is TaskStatus.PENDING


@pytest.mark.parametrize(
    ("verb", "wanted", "match"),
    [
        ("cancel", {"func": "a.b"}, "func: there is no such filter; there are args"),
        ("cancel", {"status": "gone"}, "status='gone': expected one of pending"),
        ("cancel", {"args": ["order"]}, "args=.*expected a dictionary"),
        ("cancel", {"args": {"password": "x"}}, "is hidden"),
        ("cancel", {"search": "nope:1"}, "nope: is not known"),
        ("change", {"all": True}, "give priority, to_queue, eta or delay"),
        ("change", {"all": True, "to_queue": "a b"}, "queue 'a b'"),
        ("change", {"all": True, "priority": "x"}, "priority 'x'"),
    ],
)
async def test_a_wrong_filter_is_refused_before_anything_is_changed(clocked, verb, wanted, match):
    await charges(clocked, 1)
    with pytest.raises(InvalidValue, match=match):
        await getattr(clocked.bulk, verb)(**wanted)

    assert (await clocked.stats()).by_status[TaskStatus.PENDING] == 1


def test_a_blocking_queue_has_the_same():
    with TaskQueue("memory://") as queue:
        queue.enqueue_many(charge, range(3))
        done = queue.bulk.cancel(queue="default")

    assert done == BulkReport(3, {})
