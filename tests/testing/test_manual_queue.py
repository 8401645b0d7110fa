"""The queue for tests of applications: tasks run only on request, and every fault can be injected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest

from omniq import ResultTimeout, StorageError, TaskFailed, TaskStatus
from omniq.testing.clock import ManualClock
from omniq.testing.manual import AsyncManualQueue, ManualQueue
from tests.testing import mail
from tests.testing.mail import dictate, publish, report, send


@pytest.fixture(autouse=True)
def _nothing_sent() -> Iterator[None]:
    mail.SENT.clear()
    mail.WHEN_SENDING.clear()
    yield
    mail.WHEN_SENDING.clear()


def once(act):
    """Call `act` at the first send only."""
    calls = []

    def acting():
        calls.append(1)
        if len(calls) == 1:
            act()

    mail.WHEN_SENDING.append(acting)


def test_enqueued_finds_tasks_by_the_given_arguments(omniq_queue: ManualQueue) -> None:
    omniq_queue.enqueue(send, "a@b", subject="hi")
    omniq_queue.enqueue(send, to="c@d")
    omniq_queue.enqueue(publish, "doc")

    assert omniq_queue.enqueued(send, to="a@b")
    assert omniq_queue.enqueued(send, "c@d")
    assert len(omniq_queue.enqueued(send)) == 2
    assert omniq_queue.enqueued(publish, doc="doc")
    assert not omniq_queue.enqueued(send, to="a@b", subject="bye")
    assert not omniq_queue.enqueued(report)


def test_enqueued_has_every_task_also_when_its_record_has_expired(omniq_queue: ManualQueue) -> None:
    omniq_queue.schedules.add("nightly", report, cron="0 3 * * *")
    omniq_queue.options(result_ttl=0).enqueue(send, "a@b")
    omniq_queue.run_for(days=31)

    assert len(omniq_queue.enqueued(report)) == 31
    (sent,) = omniq_queue.enqueued(send)
    assert sent.status is TaskStatus.SUCCESS
    assert len(omniq_queue.list_tasks()) < 31


def test_enqueued_has_a_retried_task_once_and_a_task_of_the_same_id_again(
    omniq_queue: ManualQueue,
) -> None:
    def fail() -> None:
        raise ValueError("no")

    once(fail)
    omniq_queue.options(task_id="daily", max_retries=0).enqueue(send, "a@b")
    omniq_queue.run()
    omniq_queue.dead.retry("daily")

    assert [task.status for task in omniq_queue.enqueued(send)] == [TaskStatus.PENDING]
    omniq_queue.run_for(days=2)
    omniq_queue.options(task_id="daily").enqueue(send, "a@b")
    omniq_queue.run()
    assert [task.status for task in omniq_queue.enqueued(send)] == [TaskStatus.SUCCESS] * 2


def test_a_task_that_waits_for_a_faulty_storage_goes_on(omniq_queue: ManualQueue) -> None:
    handle = omniq_queue.enqueue(publish, "doc")
    omniq_queue.faults.fail("checkpoint", times=3)
    omniq_queue.run()

    assert handle.status() is TaskStatus.SUCCESS


def test_a_search_without_a_match_shows_what_was_enqueued(omniq_queue: ManualQueue) -> None:
    omniq_queue.enqueue(send, "a@b")

    found = omniq_queue.enqueued(send, to="x")

    assert repr(found) == (
        "<no tests.testing.mail.send(to='x'); enqueued: tests.testing.mail.send('a@b')>"
    )


def test_no_task_runs_before_run_is_called(omniq_queue: ManualQueue) -> None:
    handle = omniq_queue.enqueue(send, "a@b")
    later = omniq_queue.options(delay=60).enqueue(send, "c@d")

    assert handle.status() is TaskStatus.PENDING
    omniq_queue.run()

    assert handle.result() == "a@b: hello"
    assert later.status() is TaskStatus.PENDING
    omniq_queue.run_for(minutes=1)
    assert mail.SENT == ["a@b", "c@d"]


def test_retries_run_after_their_delays(omniq_queue: ManualQueue, omniq_clock: ManualClock) -> None:
    began, tried = omniq_clock.now(), []
    handle = omniq_queue.enqueue(send, "a@b")

    def fail() -> None:
        tried.append((omniq_clock.now() - began).total_seconds())
        raise OSError

    mail.WHEN_SENDING.append(fail)
    omniq_queue.run_for(hours=1)

    first, second, third = tried
    assert first == 0
    assert second - first == pytest.approx(1.05, abs=0.05)
    assert third - second == pytest.approx(2.1, abs=0.15)
    assert omniq_clock.now() == began + timedelta(hours=1)
    with pytest.raises(TaskFailed, match="OSError"):
        handle.result()
    assert len(omniq_queue.dead.list()) == 1


async def test_a_month_of_schedules_runs_in_a_moment(async_omniq_queue: AsyncManualQueue) -> None:
    queue = async_omniq_queue
    await queue.schedules.add("nightly", report, cron="0 3 * * *", tz="Europe/Berlin")
    await queue.schedules.add("hourly", report, kwargs={"day": "hour"}, interval=3600)

    await queue.run_for(days=30)

    assert mail.SENT.count("today") == 30
    assert mail.SENT.count("hour") == 720


async def test_another_worker_resumes_after_a_kill_in_a_step(
    async_omniq_queue: AsyncManualQueue,
) -> None:
    queue = async_omniq_queue
    handle = await queue.enqueue(publish, "doc")
    once(queue.kill_here)

    await queue.run()

    assert await handle.result() == "https://example.org/doc"
    assert mail.SENT == ["upload doc", "announce https://example.org/doc"]
    task = await queue.get_task(handle.id)
    assert task is not None
    assert task.crashes == 1


def test_a_task_that_always_kills_its_worker_becomes_a_dead_letter(
    omniq_queue: ManualQueue,
) -> None:
    handle = omniq_queue.enqueue(send, "a@b")
    mail.WHEN_SENDING.append(omniq_queue.kill_here)

    omniq_queue.run()

    letter = omniq_queue.dead.get(handle.id)
    assert letter is not None
    assert letter.failure_reason == "crashed"


def test_a_task_runs_twice_when_its_worker_dies_before_recording(
    omniq_queue: ManualQueue,
) -> None:
    handle = omniq_queue.enqueue(send, "a@b")
    omniq_queue.kill_at("record")

    omniq_queue.run()

    assert mail.SENT == ["a@b", "a@b"]
    assert handle.result() == "a@b: hello"


def test_the_outcome_of_a_worker_that_lost_its_lease_is_discarded(
    omniq_queue: ManualQueue,
) -> None:
    handle = omniq_queue.enqueue(send, "a@b")
    omniq_queue.lose_lease()

    omniq_queue.run()

    assert mail.SENT == ["a@b", "a@b"]
    task = omniq_queue.get_task(handle.id)
    assert task is not None
    assert task.token == 2


def test_a_failed_write_is_repeated(omniq_queue: ManualQueue) -> None:
    handles = omniq_queue.enqueue_many(send, ["a@b", "c@d"])
    omniq_queue.faults.fail("record", when="after", times=2)

    omniq_queue.run(concurrency=1)

    assert sorted(mail.SENT) == ["a@b", "c@d"]
    assert [handle.status() for handle in handles] == [TaskStatus.SUCCESS] * 2


def test_an_enqueue_can_fail(omniq_queue: ManualQueue) -> None:
    omniq_queue.faults.fail("enqueue")

    with pytest.raises(StorageError):
        omniq_queue.enqueue(send, "a@b")
    assert not omniq_queue.enqueued(send)


def test_killing_without_a_worker_raises(omniq_queue: ManualQueue) -> None:
    with pytest.raises(RuntimeError, match="no worker runs"):
        omniq_queue.kill_here()


@pytest.mark.parametrize("timeout", [1, None])
def test_the_result_of_a_task_that_has_not_ended_is_refused_at_once(
    omniq_queue: ManualQueue, timeout: float | None
) -> None:
    handle = omniq_queue.enqueue(send, "a@b")
    with pytest.raises(ResultTimeout, match=r"only in run\(\) and run_for\(\)"):
        handle.result(timeout)

    omniq_queue.run()
    handle.result(timeout)


async def test_a_result_is_awaited_while_the_tasks_run() -> None:
    async with AsyncManualQueue() as queue:
        handle = await queue.enqueue(send, "a@b")
        await asyncio.gather(handle.result(30), queue.run())


def test_a_test_reads_what_its_tasks_stream(omniq_queue: ManualQueue) -> None:
    handle = omniq_queue.enqueue(dictate)
    omniq_queue.run()
    with pytest.raises(ResultTimeout, match=r"only in run\(\) and run_for\(\)"):
        list(handle.stream())
    omniq_queue.run_for(minutes=1)

    assert [(chunk.value, chunk.attempt) for chunk in handle.stream()] == [("Dear", 2), ("Ada", 2)]
    assert len(list(handle.stream(logs=True, all_runs=True))) == 6


def test_a_store_that_refuses_output_does_not_fail_the_task(omniq_queue: ManualQueue) -> None:
    omniq_queue.faults.fail("output", times=2)
    handle = omniq_queue.enqueue(dictate)
    omniq_queue.run_for(minutes=1)

    assert [chunk.value for chunk in handle.stream()] == ["Dear", "Ada"]


def test_a_worker_that_lost_its_task_adds_no_output(omniq_queue: ManualQueue) -> None:
    omniq_queue.kill_at("output")
    handle = omniq_queue.enqueue(dictate)
    omniq_queue.run_for(minutes=1)

    runs = {(chunk.run, chunk.attempt) for chunk in handle.stream(all_runs=True)}
    assert runs == {(2, 2)}
