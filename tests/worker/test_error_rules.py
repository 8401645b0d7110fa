"""Error rules of a task, of a worker and of the whole application; the same in every executor."""

from __future__ import annotations

from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    ErrorCategory,
    ErrorRules,
    InvalidTask,
    InvalidValue,
    Settings,
    TaskResult,
)
from omniq.errors import SettingsError
from omniq.storage.memory import MemoryStorage
from tests.worker import step_tasks as tasks
from tests.worker.step_tasks import effects, plan_failures

pytestmark = pytest.mark.timeout(120)

PLAIN = [tasks.fail_with, tasks.fail_with_in_thread, tasks.fail_with_in_process]
OWN = [
    tasks.fail_by_own_rules,
    tasks.fail_by_own_rules_in_thread,
    tasks.fail_by_own_rules_in_process,
]


async def run(queue: AsyncTaskQueue, func: Any, *args: Any, **worker: Any) -> TaskResult:
    handle = await queue.options(max_retries=1).enqueue(func, *args)
    async with queue.worker(base_retry_delay=0.001, poll_interval=0.05, **worker):
        result = await queue.get_result(handle.id, timeout=20)
    assert result is not None
    return result


@pytest.mark.parametrize("func", OWN)
async def test_a_task_can_declare_which_errors_are_permanent(memory_queue, tmp_path, func):
    refused = await run(memory_queue, func, str(tmp_path), "Refused")
    busy = await run(memory_queue, func, str(tmp_path), "Busy")
    other = await run(memory_queue, func, str(tmp_path), "ValueError")

    assert (refused.reason, refused.attempts) == ("permanent", 1)
    assert (busy.reason, busy.attempts) == ("exhausted", 2)
    assert (other.reason, other.attempts) == ("exhausted", 2)
    assert refused.error is not None
    assert refused.error.category is ErrorCategory.PERMANENT


@pytest.mark.parametrize("func", PLAIN)
async def test_a_worker_may_retry_only_what_is_transient(memory_queue, tmp_path, func):
    rules = {"errors": tasks.WORKER_RULES}
    refused = await run(memory_queue, func, str(tmp_path), "Refused", **rules)
    other = await run(memory_queue, func, str(tmp_path), "ValueError", **rules)
    transient = await run(memory_queue, func, str(tmp_path), "TransientError", **rules)

    assert (refused.reason, refused.attempts) == ("permanent", 1)
    assert (other.reason, other.attempts) == ("unclassified", 1)
    assert other.error is not None
    assert other.error.category is ErrorCategory.UNCLASSIFIED
    letters = await memory_queue.dead.list(reason="unclassified")
    assert [letter.task_id for letter in letters] == [other.task_id]
    assert (transient.reason, transient.attempts) == ("exhausted", 2)


async def test_the_rules_of_a_task_come_before_those_of_its_worker(memory_queue, tmp_path):
    result = await run(
        memory_queue, tasks.fail_against_the_worker, str(tmp_path), errors=tasks.WORKER_RULES
    )

    assert (result.reason, result.attempts) == ("exhausted", 2)


async def test_a_setting_gives_rules_to_the_whole_application(tmp_path):
    settings = Settings(errors="tests.worker.step_tasks.WORKER_RULES")
    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:
        result = await run(queue, tasks.fail_with, str(tmp_path), "ValueError")

    assert (result.reason, result.attempts) == ("unclassified", 1)


async def test_error_rules_apply_to_steps_too(memory_queue, tmp_path):
    plan_failures(tmp_path, "index", kind="Refused")
    result = await run(memory_queue, tasks.publish_async, str(tmp_path), errors=tasks.WORKER_RULES)

    assert result.error is not None
    assert (result.reason, result.error.category) == ("permanent", ErrorCategory.PERMANENT)
    assert (result.error.failed_step, effects(tmp_path)) == ("index", ["update", "index"])


async def test_rules_that_cannot_work_are_refused_at_the_start(memory_queue):
    with pytest.raises(InvalidValue, match="expected ErrorRules"):
        memory_queue.worker(errors=ValueError)
    with pytest.raises(InvalidTask, match="define the rules of a worker in a module"):
        await memory_queue.worker(errors=ErrorRules(transient=(lambda error: True,))).start()
    settings = Settings(errors="tests.worker.step_tasks.no_such_rules")
    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:
        with pytest.raises(SettingsError, match="there are no such rules"):
            queue.worker()
