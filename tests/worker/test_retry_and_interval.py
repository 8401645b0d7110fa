"""When a task runs again: after a failure, after an interval, or because it requested that."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq import (
    AsyncTaskQueue,
    LinearBackoff,
    Settings,
    Task,
    TaskCancelled,
    TaskFailed,
    TaskResult,
    TaskStatus,
)
from omniq.storage.memory import MemoryStorage
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, a_while, until


async def read(queue: AsyncTaskQueue, task_id: str) -> tuple[Task, TaskResult]:
    task, result = await queue.get_task(task_id), await queue.get_result(task_id)
    assert task is not None
    assert result is not None
    return task, result


async def delay_of(queue: AsyncTaskQueue, task_id: str) -> float:
    """Seconds from the end of the newest run to the next one."""
    task, result = await read(queue, task_id)
    assert task.eta is not None
    assert result.finished_at is not None
    return (task.eta - result.finished_at).total_seconds()


async def test_a_failed_run_is_retried_until_it_succeeds(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.enqueue(sample_tasks.fail_at_first, "flaky", 2)
    async with queue.worker(base_retry_delay=0.01):
        assert await handle.result(30) == 3

    _, result = await read(queue, handle.id)
    assert (recorder.names(), result.attempts) == (["flaky"] * 3, 3)


async def test_a_task_runs_once_more_often_than_it_may_be_retried(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(max_retries=2).enqueue(sample_tasks.fail_at_first, "bad", 99)
    async with queue.worker(base_retry_delay=0.01):
        with pytest.raises(TaskFailed, match="run 3"):
            await handle.result(30)

    task, result = await read(queue, handle.id)
    assert len(recorder.names()) == 3
    assert (task.status, task.attempts, result.reason) == (TaskStatus.FAILED, 3, "exhausted")
    letter = await queue.dead.get(handle.id)
    assert letter is not None
    assert (letter.attempt_count, letter.failure_reason) == (3, "exhausted")


async def test_without_retries_the_first_failure_is_the_last(queue: AsyncTaskQueue) -> None:
    handle = await queue.options(max_retries=0).enqueue(sample_tasks.fail)
    await queue.worker().run_until_empty()

    assert await handle.status() is TaskStatus.FAILED


async def test_a_retry_waits_in_the_store_and_not_in_a_slot(
    store: Store, recorder: RunRecorder
) -> None:
    async with AsyncTaskQueue(store.another()) as queue:
        failed = await queue.enqueue(sample_tasks.fail)
        async with queue.worker(base_retry_delay=60, poll_interval=60) as pool:
            other = await queue.enqueue(sample_tasks.note, "next")
            await other.result(30)
            assert pool.stats().active_workers == 0

    async with AsyncTaskQueue(store.another()) as reopened:
        task, result = await read(reopened, failed.id)
        assert (task.status, task.attempts) == (TaskStatus.RETRYING, 1)
        assert (result.status, result.error and result.error.message) == (
            TaskStatus.RETRYING,
            "boom",
        )


async def test_a_retry_starts_when_it_is_due_and_not_a_poll_later(
    queue: AsyncTaskQueue,
) -> None:
    handle = await queue.enqueue(sample_tasks.fail_at_first, "flaky", 1)
    async with queue.worker(base_retry_delay=0.1, poll_interval=60):
        assert await handle.result(30) == 2


async def test_retry_after_of_an_error_is_the_least_delay(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.fail_with_retry_after, 600.0)
    await queue.worker(base_retry_delay=1).run_until_empty()

    assert 599 <= await delay_of(queue, handle.id) <= 601


async def test_a_task_may_choose_linear_delays(queue: AsyncTaskQueue) -> None:
    handle = await queue.options(retry=LinearBackoff(step=100.0)).enqueue(sample_tasks.fail)
    delays = []
    for _ in range(2):
        await queue.worker().run_until_empty()
        delays.append(await delay_of(queue, handle.id))
        task, _ = await read(queue, handle.id)
        assert task.eta is not None
        assert await queue.storage.dequeue(task.eta) is not None
        await queue.storage.reschedule(handle.id, queue.storage.clock.now())

    assert delays == [pytest.approx(100, abs=1), pytest.approx(200, abs=1)]


async def test_a_retry_that_the_task_requested_starts_after_the_requested_delay(
    queue: AsyncTaskQueue,
) -> None:
    handle = await queue.enqueue(sample_tasks.ask_for_retry, 300.0)
    await queue.worker().run_until_empty()

    assert 299 <= await delay_of(queue, handle.id) <= 301


async def test_a_permanent_error_is_not_retried(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.fail_for_good)
    await queue.worker().run_until_empty()

    task, result = await read(queue, handle.id)
    assert (task.status, task.attempts, result.reason) == (TaskStatus.FAILED, 1, "permanent")


async def test_a_task_that_is_cancelled_between_two_runs_ends_at_once(
    queue: AsyncTaskQueue,
) -> None:
    handle = await queue.enqueue(sample_tasks.fail)
    await queue.worker(base_retry_delay=60).run_until_empty()
    assert await handle.cancel()

    with pytest.raises(TaskCancelled):
        await handle.result(30)


async def test_the_error_is_stored_with_its_type_text_and_traceback(queue: AsyncTaskQueue) -> None:
    handle = await queue.options(max_retries=0).enqueue(sample_tasks.fail_in_thread, "as expected")
    await queue.worker().run_until_empty()

    _, result = await read(queue, handle.id)
    assert result.error is not None
    assert (result.error.error_type, result.error.message) == ("ValueError", "as expected")
    assert "in fail_in_thread" in (result.error.traceback or "")


async def test_a_snoozed_task_runs_again_without_using_an_attempt(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.enqueue(sample_tasks.snooze_once, "sleepy", 0.05)
    async with queue.worker(poll_interval=60):
        assert await handle.result(30) == 1

    assert recorder.names() == ["sleepy"] * 2


async def test_a_discarded_task_ends_as_cancelled_with_its_reason(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(sample_tasks.discard)
    await queue.worker().run_until_empty()

    with pytest.raises(TaskCancelled, match="not needed"):
        await handle.result(30)


# Timeouts


async def test_a_run_past_its_timeout_is_stopped_and_fails(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(timeout=0.05, max_retries=0).enqueue(sample_tasks.hold, "slow")
    async with queue.worker(poll_interval=60):
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(30)

    assert recorder.names() == ["slow", "slow cancelled"]


async def test_a_timeout_is_retried_like_any_failure(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(timeout=0.05).enqueue(sample_tasks.hold, "slow")
    async with queue.worker(base_retry_delay=0.01, poll_interval=60):
        await until(lambda: recorder.names().count("slow") >= 2)
        recorder.gate("slow").set()
        assert await handle.result(30) == "slow"


async def test_a_task_without_a_timeout_has_the_one_of_the_settings(
    store: Store, recorder: RunRecorder
) -> None:
    assert Settings().default_timeout == 300
    async with AsyncTaskQueue(store.another(default_timeout=0.05)) as queue:
        handle = await queue.options(max_retries=0).enqueue(sample_tasks.hold, "slow")
        async with queue.worker():
            with pytest.raises(TaskFailed, match="TaskTimeout"):
                await handle.result(30)


async def test_a_thread_past_its_timeout_frees_its_slot_and_is_counted(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(timeout=0.05, max_retries=0).enqueue(
        sample_tasks.hold_in_thread, "stuck"
    )
    async with queue.worker(max_leaked_threads=2) as pool:
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(30)
        assert pool.stats().leaked_threads == 1
        assert await (await queue.enqueue(sample_tasks.add, 1)).result(30) == 1
        recorder.open_all()
        await until(lambda: pool.stats().leaked_threads == 0)


async def test_a_task_that_ignores_its_timeout_frees_its_slot(
    memory_queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await memory_queue.options(timeout=0.05, max_retries=0).enqueue(
        sample_tasks.ignore_cancellation, "ignore_cancellation"
    )
    async with memory_queue.worker():
        with pytest.raises(TaskFailed, match="TaskTimeout"):
            await handle.result(30)
        assert await (await memory_queue.enqueue(sample_tasks.add, 1)).result(30) == 1


# Intervals


async def test_an_interval_task_keeps_its_id_and_runs_again_and_again(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(interval=0.05, task_id="tick").enqueue(sample_tasks.note, "tick")
    async with queue.worker(poll_interval=60):
        await until(lambda: len(recorder.names()) >= 3)

    task = await queue.get_task(handle.id)
    assert task is not None
    assert (task.id, task.status, task.attempts) == ("tick", TaskStatus.PENDING, 0)
    assert [task.id for task in await queue.list_tasks()] == ["tick"]
    gaps = [b - a for a, b in zip(recorder.times("tick"), recorder.times("tick")[1:], strict=False)]
    assert min(gaps) >= 0.049


async def test_the_next_run_starts_an_interval_after_the_last_and_missed_runs_are_skipped(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(interval=0.1).enqueue(sample_tasks.hold, "slow")
    async with queue.worker(poll_interval=60):
        await until(lambda: recorder.inside == 1)
        await a_while(0.3)
        recorder.open_all()
        await until(lambda: recorder.inside == 0 and recorder.names() == ["slow"])
        await until(lambda: len(recorder.names()) >= 2)

    task, result = await read(queue, handle.id)
    assert result.finished_at is not None
    assert task.eta == result.finished_at + timedelta(seconds=0.1)
    first, second = recorder.times("slow")[:2]
    assert second - first >= 0.39


async def test_a_retry_between_two_intervals_resets_the_attempts(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(interval=60).enqueue(sample_tasks.fail_at_first, "flaky", 1)
    async with queue.worker(base_retry_delay=0.01, poll_interval=60):
        await until(lambda: len(recorder.names()) >= 2)

    task, result = await read(queue, handle.id)
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 2)


async def test_an_interval_task_that_has_used_up_its_retries_ends_as_failed(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(interval=0.01, max_retries=1).enqueue(
        sample_tasks.fail_at_first, "bad", 99
    )
    async with queue.worker(base_retry_delay=0.01):
        with pytest.raises(TaskFailed):
            await handle.result(30)

    assert recorder.names() == ["bad"] * 2
    assert await queue.dead.get(handle.id) is not None


async def test_cancelling_an_interval_task_ends_it(
    queue: AsyncTaskQueue, recorder: RunRecorder
) -> None:
    handle = await queue.options(interval=0.02).enqueue(sample_tasks.hold, "tick")
    async with queue.worker(poll_interval=60):
        await until(lambda: recorder.inside == 1)
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result(30)

    assert recorder.names().count("tick") == 1


async def test_the_next_runs_of_all_that_repeat_survive_a_restart_of_the_pool(
    recorder: RunRecorder,
) -> None:
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        handle = await queue.options(interval=0.05).enqueue(sample_tasks.note, "tick")
        await queue.worker().run_until_empty()
        async with queue.worker(poll_interval=60):
            await until(lambda: len(recorder.names()) >= 2)
        assert (await read(queue, handle.id))[0].status is TaskStatus.PENDING
