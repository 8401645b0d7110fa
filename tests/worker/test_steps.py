"""Durable steps: each is done once, however the run ends, on every worker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from omniq import (
    AsyncTaskQueue,
    ErrorCategory,
    Settings,
    StaleClaim,
    TaskCancelled,
    TaskResult,
    TaskStatus,
    events,
)
from omniq.events import Dispatcher, StepSkipped
from omniq.storage.memory import MemoryStorage
from omniq.tasks.functions import FunctionCache
from omniq.tasks.steps import read_checkpoint
from omniq.testing.clock import ManualClock
from omniq.testing.faults import FaultyStorage
from omniq.worker.dead_hooks import DeadHooks
from omniq.worker.failure_hooks import FailureHooks
from omniq.worker.fleet_alerts import FleetAlerts
from omniq.worker.lease_watch import LeaseWatch
from omniq.worker.maintenance import Maintenance
from omniq.worker.stats_recorder import StatsRecorder
from tests.worker import step_tasks as tasks
from tests.worker.conftest import Store
from tests.worker.recorder import until
from tests.worker.step_tasks import STEPS, effects, plan_failures

pytestmark = pytest.mark.timeout(120)

EVERYWHERE = pytest.mark.parametrize("publish", tasks.PLACES, ids=lambda func: func.__name__)


async def run(queue: AsyncTaskQueue, func: Any, *args: Any, max_retries: int = 3) -> TaskResult:
    """Run the task, with immediate retries; returns its result."""
    handle = await queue.options(max_retries=max_retries).enqueue(func, *args)
    async with queue.worker(base_retry_delay=0.001, poll_interval=0.05):
        result = await queue.get_result(handle.id, timeout=20)
    assert result is not None
    return result


class CountingStorage(MemoryStorage):
    """Counts how often a checkpoint is loaded."""

    loads = 0

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        self.loads += 1
        return await super().load_checkpoint(task_id)


@EVERYWHERE
async def test_a_task_whose_steps_succeed_does_each_once(memory_queue, tmp_path, publish):
    result = await run(memory_queue, publish, str(tmp_path))

    assert result.result == [f"{step} done" for step in STEPS]
    assert effects(tmp_path) == list(STEPS)
    assert result.warnings == ()
    assert await memory_queue.storage.load_checkpoint(result.task_id) is None


@EVERYWHERE
async def test_a_retry_continues_at_the_step_that_failed(memory_queue, tmp_path, publish):
    plan_failures(tmp_path, "move", times=2)
    result = await run(memory_queue, publish, str(tmp_path))

    assert result.status is TaskStatus.SUCCESS
    assert result.result == [f"{step} done" for step in STEPS]
    assert effects(tmp_path) == ["update", "index", "move", "move", "move", "mark", "comment"]
    assert result.attempts == 3


async def test_a_retry_continues_at_the_step_that_failed_on_every_backend(queue, tmp_path):
    plan_failures(tmp_path, "index", times=1)
    result = await run(queue, tasks.publish_async, str(tmp_path))

    assert effects(tmp_path) == ["update", "index", "index", "move", "mark", "comment"]
    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 2)
    assert await queue.storage.load_checkpoint(result.task_id) is None


async def test_another_worker_continues_where_the_first_one_stopped(store: Store, tmp_path):
    plan_failures(tmp_path, "move")
    async with AsyncTaskQueue(store.another()) as first:
        handle = await first.enqueue(tasks.publish_async, str(tmp_path))
        await first.worker(base_retry_delay=0).run_until_empty()
    async with AsyncTaskQueue(store.another()) as second, second.worker(poll_interval=0.05):
        result = await second.get_result(handle.id, timeout=30)

    assert result is not None
    assert result.result == [f"{step} done" for step in STEPS]
    assert effects(tmp_path) == ["update", "index", "move", "move", "mark", "comment"]


# The error of a failure


@EVERYWHERE
@pytest.mark.parametrize(
    ("step", "category", "hint"),
    [
        ("update", ErrorCategory.TRANSIENT, "nothing is done yet: safe to retry from beginning"),
        ("index", ErrorCategory.PARTIAL, "already done: update; a retry continues with index"),
        ("move", ErrorCategory.PARTIAL, "already done: update, index; a retry continues with move"),
    ],
)
async def test_the_error_of_a_failed_step_names_it_and_the_finished_steps(
    memory_queue, tmp_path, publish, step, category, hint
):
    plan_failures(tmp_path, step)
    result = await run(memory_queue, publish, str(tmp_path), max_retries=0)

    assert result.error is not None
    assert (result.error.category, result.error.failed_step) == (category, step)
    assert result.error.recovery_hint == hint
    assert (result.error.error_type, result.reason) == ("ValueError", "exhausted")
    assert str(result.error) == f"{step}: {step} is not to be had (category: {category})"


@EVERYWHERE
async def test_a_permanent_error_in_a_step_is_permanent(memory_queue, tmp_path, publish):
    plan_failures(tmp_path, "index", kind="PermanentError")
    result = await run(memory_queue, publish, str(tmp_path))

    assert result.error is not None
    assert (result.error.category, result.reason) == (ErrorCategory.PERMANENT, "permanent")
    assert result.error.failed_step == "index"
    assert result.error.recovery_hint == "already done: update; a retry continues with index"
    assert effects(tmp_path) == ["update", "index"]


@EVERYWHERE
async def test_a_step_that_is_not_critical_warns_and_the_task_continues(
    memory_queue, tmp_path, publish
):
    plan_failures(tmp_path, "mark")
    emitted: list[StepSkipped] = []
    handle = await memory_queue.enqueue(publish, str(tmp_path))
    async with memory_queue.worker() as pool:
        pool.events.subscribe(lambda e: emitted.append(e) if isinstance(e, StepSkipped) else None)
        result = await memory_queue.get_result(handle.id, timeout=20)
        await until(lambda: emitted)

    assert (result.status, result.result[-2:]) == (TaskStatus.SUCCESS, [None, "comment done"])
    assert result.warnings == ("step mark failed: ValueError: mark is not to be had",)
    assert effects(tmp_path) == list(STEPS)
    assert [(event.step, event.error) for event in emitted] == [("mark", "ValueError")]


async def test_a_skipped_step_is_retried_with_its_task(memory_queue, tmp_path):
    plan_failures(tmp_path, "mark")
    result = await run(memory_queue, tasks.publish_async, str(tmp_path))
    assert len(result.warnings) == 1
    plan_failures(tmp_path, "move", times=1)
    again = await run(memory_queue, tasks.publish_async, str(tmp_path))

    assert again.warnings == ()


async def test_an_error_that_was_caught_and_raised_again_still_names_the_step(
    memory_queue, tmp_path
):
    plan_failures(tmp_path, "flaky")
    result = await run(memory_queue, tasks.catches_its_own, str(tmp_path), max_retries=0)

    assert result.error is not None
    assert (result.error.error_type, result.error.failed_step) == ("RuntimeError", "flaky")


async def test_the_error_of_a_timeout_names_the_running_step(memory_queue, tmp_path):
    handle = await memory_queue.options(timeout=0.2, max_retries=0).enqueue(
        tasks.hangs_in_a_step, str(tmp_path)
    )
    async with memory_queue.worker():
        result = await memory_queue.get_result(handle.id, timeout=30)

    assert (result.error.error_type, result.error.failed_step) == ("TaskTimeout", "slow")
    assert result.error.category is ErrorCategory.PARTIAL
    assert result.error.recovery_hint == "already done: first; a retry continues with slow"


# Dead letters


async def test_a_dead_letter_keeps_the_checkpoint_and_resumes_at_the_failed_step(queue, tmp_path):
    plan_failures(tmp_path, "move")
    result = await run(queue, tasks.publish_async, str(tmp_path), max_retries=0)
    letter = await queue.dead.get(result.task_id)
    assert letter is not None
    assert read_checkpoint(
        queue.storage.serializer, (letter.task_id, letter.func_path), letter.checkpoint
    ).done() == ["update", "index"]
    assert await queue.dead.retry(result.task_id)
    await queue.worker().run_until_empty()

    again = await queue.get_result(result.task_id)
    assert again is not None
    assert again.status is TaskStatus.SUCCESS
    assert effects(tmp_path) == ["update", "index", "move", "move", "mark", "comment"]


async def test_a_dead_letter_retried_from_the_start_does_all_steps_again(queue, tmp_path):
    plan_failures(tmp_path, "move")
    result = await run(queue, tasks.publish_async, str(tmp_path), max_retries=0)
    assert await queue.dead.retry(result.task_id, from_start=True)
    await queue.worker().run_until_empty()

    assert effects(tmp_path) == ["update", "index", "move", *STEPS]


# Rules of the steps themselves


@pytest.mark.parametrize("func", [tasks.together, tasks.threads_together, tasks.threads_in_process])
async def test_concurrent_steps_lose_no_result(memory_queue, tmp_path, func):
    plan_failures(tmp_path, "last")
    result = await run(memory_queue, func, str(tmp_path), 20)

    assert result.result == 20
    assert sorted(effects(tmp_path)) == sorted([*(f"s{n}" for n in range(20)), "last", "last"])


async def test_concurrent_saves_are_one_write(tmp_path):
    storage = FaultyStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue:
        storage.delay("checkpoint", seconds=0.05)
        await run(queue, tasks.together, str(tmp_path), 20)

    # One for the first step, one for all that finished meanwhile, and one for the last step.
    assert storage.calls["checkpoint"] == 3


async def test_a_task_without_steps_neither_loads_nor_saves(tmp_path):
    """The first run of a task with steps loads nothing either."""
    storage = CountingStorage()
    async with AsyncTaskQueue(storage) as queue:
        await run(queue, tasks.fail_with, str(tmp_path), "ValueError", max_retries=2)
        await run(queue, tasks.publish_async, str(tmp_path))
        assert storage.loads == 0
        plan_failures(tmp_path, "move", times=2)
        await run(queue, tasks.publish_async, str(tmp_path))

    assert storage.loads == 2


async def test_a_name_may_be_used_once_in_a_run(memory_queue, tmp_path):
    result = await run(memory_queue, tasks.same_name_twice, str(tmp_path), max_retries=0)

    assert result.error is not None
    assert result.error.error_type == "InvalidTask"
    assert "'same' was begun twice" in result.error.message
    assert effects(tmp_path) == ["same"]


async def test_a_failed_step_can_be_retried_in_the_same_run(memory_queue, tmp_path):
    plan_failures(tmp_path, "flaky")
    result = await run(memory_queue, tasks.try_again_within, str(tmp_path), max_retries=0)

    assert (result.result, effects(tmp_path)) == ("flaky done", ["flaky", "flaky"])


async def test_steps_that_the_code_no_longer_has_are_ignored(memory_queue, tmp_path):
    plan_failures(tmp_path, "last")
    result = await run(memory_queue, tasks.changes_its_code, str(tmp_path))

    assert result.status is TaskStatus.SUCCESS
    assert effects(tmp_path) == ["one", "gone", "last", "new", "last"]


@pytest.mark.parametrize("what", ["object", "large"])
async def test_a_result_that_cannot_be_stored_fails_the_task_permanently(what):
    storage = MemoryStorage(settings=Settings(max_payload=50_000))
    async with AsyncTaskQueue(storage) as queue:
        result = await run(queue, tasks.returns, what)

    assert result.error is not None
    assert (result.reason, result.error.failed_step) == ("permanent", "make")
    assert result.error.error_type == "SerializationError"


async def test_a_plain_function_runs_beside_the_loop_of_an_async_task(memory_queue, tmp_path):
    result = await run(memory_queue, tasks.plain_functions_async, str(tmp_path))

    assert result.result == [False, True]


async def test_an_async_function_needs_an_async_task(memory_queue, tmp_path):
    result = await run(memory_queue, tasks.async_function_in_thread, str(tmp_path), max_retries=0)

    assert result.error is not None
    assert "an async function needs an async task" in result.error.message


async def test_a_task_may_ask_for_a_retry_within_a_step(memory_queue, tmp_path):
    result = await run(memory_queue, tasks.signals_in_a_step, str(tmp_path), "retry")

    assert (result.result, effects(tmp_path)) == ("asked", ["ask", "ask"])


async def test_a_task_may_be_discarded_within_a_step(memory_queue, tmp_path):
    result = await run(memory_queue, tasks.signals_in_a_step, str(tmp_path), "discard")

    assert (result.status, result.reason) == (TaskStatus.CANCELLED, "enough")


@pytest.mark.parametrize("func", [tasks.looks_back_async, tasks.looks_back_in_thread])
async def test_a_task_sees_what_it_has_done(memory_queue, tmp_path, func):
    plan_failures(tmp_path, "two")
    result = await run(memory_queue, func, str(tmp_path))

    assert result.result == {
        "before": {"one": "one done"},
        "after": {"one": "one done", "two": "two done"},
        "has": True,
    }


async def test_reading_ctx_checkpoint_without_await_raises_an_error_that_says_so(
    memory_queue, tmp_path
):
    plan_failures(tmp_path, "look")
    result = await run(memory_queue, tasks.looks_too_early, str(tmp_path), max_retries=1)

    assert result.error is not None
    assert "await ctx.checkpoint" in result.error.message


# An unreachable storage, a lost lease


async def test_an_unreachable_storage_repeats_no_step(tmp_path):
    storage = FaultyStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue:
        storage.fail("checkpoint", at=2, times=3)
        storage.fail("checkpoint", at=6, when="after")
        result = await run(queue, tasks.publish_async, str(tmp_path))

    assert (result.status, result.attempts) == (TaskStatus.SUCCESS, 1)
    assert effects(tmp_path) == list(STEPS)


@pytest.mark.parametrize("func", [tasks.publish_async, tasks.publish_in_thread])
async def test_a_run_whose_claim_has_ended_stores_nothing_and_stops(tmp_path, func):
    storage = FaultyStorage(MemoryStorage())
    stale: list[Any] = []
    async with AsyncTaskQueue(storage) as queue:
        handle = await queue.enqueue(func, str(tmp_path))
        storage.fail("checkpoint", error=StaleClaim(handle.id, 1))
        async with queue.worker() as pool:
            pool.events.subscribe(stale.append)
            await until(lambda: any(isinstance(e, events.TaskRetried) for e in stale))

        assert effects(tmp_path) == ["update"]
        assert await storage.load_checkpoint(handle.id) is None


async def test_a_checkpoint_that_cannot_be_read_is_permanent(memory_queue, tmp_path):
    storage = memory_queue.storage
    handle = await memory_queue.enqueue(tasks.publish_async, str(tmp_path))
    task = await storage.dequeue(storage.clock.now())
    await storage.save_checkpoint(handle.id, task.token, b"\xc1 garbage")
    await storage.reschedule(handle.id, storage.clock.now())
    await memory_queue.worker().run_until_empty()
    result = await memory_queue.get_result(handle.id)

    assert (result.reason, effects(tmp_path)) == ("permanent", [])
    assert result.error.recovery_hint == "retry it from the start, which drops the checkpoint"


async def test_a_task_resumes_from_a_pickled_checkpoint_in_every_executor(tmp_path):
    """The child process does not have the key of the store."""
    settings = Settings(serializer="cloudpickle", signing_key="a secret of the store")
    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:
        plan_failures(tmp_path, "move", times=2)
        handle = await queue.enqueue(tasks.publish_in_process, str(tmp_path))
        await queue.worker(base_retry_delay=0).run_until_empty()
        async with queue.worker(base_retry_delay=0, poll_interval=0.05):
            assert await handle.result(10) == [f"{step} done" for step in STEPS]

    assert effects(tmp_path) == ["update", "index", "move", "move", "move", "mark", "comment"]


# Iteration


@pytest.mark.parametrize("iterate", tasks.ITERATIONS, ids=lambda func: func.__name__)
async def test_an_iteration_continues_after_the_last_finished_item(memory_queue, tmp_path, iterate):
    plan_failures(tmp_path, "row7", times=2)
    result = await run(memory_queue, iterate, str(tmp_path), 10, 4)

    assert result.status is TaskStatus.SUCCESS
    assert effects(tmp_path) == [
        *(f"row{n}" for n in range(8)),
        "row7",
        *(f"row{n}" for n in range(7, 10)),
    ]


async def test_an_iteration_source_can_continue_after_an_item(queue, tmp_path):
    plan_failures(tmp_path, "row2")
    plan_failures(tmp_path, "end")
    result = await run(queue, tasks.iterate_after, str(tmp_path), 4)
    fetches = [effect for effect in effects(tmp_path) if effect.startswith("fetch")]

    assert result.result is True
    assert fetches == ["fetch0", "fetch1", "fetch2", "fetch2", "fetch3"]
    assert effects(tmp_path).count("row2") == 2
    assert effects(tmp_path)[-1] == "end"


async def test_only_async_tasks_iterate_over_async_sources(memory_queue, tmp_path):
    result = await run(memory_queue, tasks.iterate_wrongly, str(tmp_path), max_retries=0)

    assert result.error is not None
    assert "only async tasks iterate over this" in result.error.message


async def test_the_position_of_an_iteration_is_saved_after_a_given_number_of_items(tmp_path):
    storage = FaultyStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue:
        await run(queue, tasks.iterate_async, str(tmp_path), 10, 4)

    # After the fourth and the eighth item, and at the end.
    assert storage.calls["checkpoint"] == 3


# Sleep


@pytest.mark.parametrize("sleep", tasks.SLEEPS, ids=lambda func: func.__name__)
async def test_a_task_that_sleeps_frees_its_slot_and_continues_from_there(
    memory_queue, tmp_path, sleep
):
    handle = await memory_queue.enqueue(sleep, str(tmp_path), 0.2)
    async with memory_queue.worker(poll_interval=0.05) as pool:
        snoozed: list[Any] = []
        pool.events.subscribe(snoozed.append)
        assert await handle.result(20) == [1, 3]

    assert sum(isinstance(event, events.TaskSnoozed) for event in snoozed) == 2
    assert effects(tmp_path) == ["before", "awake", "awake", "between", "awake"]


async def test_a_sleep_lasts_as_long_as_it_should_on_every_backend(queue, tmp_path):
    handle = await queue.enqueue(tasks.sleep_async, str(tmp_path), 600)
    await queue.worker().run_until_empty()
    task = await queue.get_task(handle.id)

    assert (task.status, task.attempts) == (TaskStatus.PENDING, 0)
    left = task.eta - queue.storage.clock.now()
    assert timedelta(seconds=590) < left <= timedelta(seconds=600)


async def test_a_task_that_is_resumed_too_early_continues_to_sleep(memory_queue, tmp_path):
    storage = memory_queue.storage
    handle = await memory_queue.enqueue(tasks.sleep_async, str(tmp_path), 600)
    await memory_queue.worker().run_until_empty()
    first = await memory_queue.get_task(handle.id)
    assert await storage.dequeue(first.eta) is not None
    await storage.reschedule(handle.id, storage.clock.now())
    await memory_queue.worker().run_until_empty()
    second = await memory_queue.get_task(handle.id)

    assert second.token == 3
    assert abs(second.eta - first.eta) < timedelta(seconds=1)


async def test_a_sleeping_task_may_be_cancelled(memory_queue, tmp_path):
    handle = await memory_queue.enqueue(tasks.sleep_async, str(tmp_path), 600)
    await memory_queue.worker().run_until_empty()
    await handle.cancel()

    with pytest.raises(TaskCancelled):
        await handle.result(30)
    assert await memory_queue.storage.load_checkpoint(handle.id) is None


# Clean-up


async def test_orphaned_checkpoints_are_deleted_and_those_of_waiting_tasks_are_not(tmp_path):
    clock, dispatcher, functions = ManualClock(), Dispatcher(), FunctionCache()
    async with MemoryStorage(clock=clock) as storage:
        maintenance = Maintenance(
            storage,
            dispatcher,
            FleetAlerts(storage, dispatcher, StatsRecorder(dispatcher)),
            DeadHooks(storage, functions, FailureHooks(functions, dispatcher)),
            LeaseWatch(clock, 30, lambda: False),
            lease=30,
            poll_interval=1,
        )
        waiting = await AsyncTaskQueue(storage).enqueue(tasks.publish_async, str(tmp_path))
        task = await storage.dequeue(clock.now())
        assert task is not None
        await storage.save_checkpoint(waiting.id, task.token, b"waiting")
        await storage.reschedule(waiting.id, clock.now() + timedelta(days=30))
        # This version leaves no orphans; another version, or a manual repair, may have.
        orphan = msgspec.structs.replace(
            storage._memory.tables.documents["checkpoint"].by_key[waiting.id], key="gone"
        )
        storage._memory.tables.documents["checkpoint"].put(orphan)
        await maintenance.purge_orphans()
        assert await storage.load_checkpoint("gone") == b"waiting"
        clock.advance(timedelta(days=2))
        await maintenance.purge_orphans()

        assert await storage.load_checkpoint("gone") is None
        assert await storage.load_checkpoint(waiting.id) == b"waiting"
