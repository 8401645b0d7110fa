"""`queue.check` finds everything stored that a worker with these modules could not run, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    CheckProblem,
    CheckReport,
    Flow,
    InvalidTask,
    Settings,
    SettingsError,
    TaskQueue,
)
from omniq.models import Task, TaskStatus
from omniq.operations.check import check_stored
from omniq.outcomes import Failed
from omniq.storage.memory import MemoryStorage
from omniq.tasks.functions import FunctionCache
from omniq.testing.builders import a_task, an_error
from tests.worker import checked_tasks, versioned_tasks, wrong_schedules

MODULE = checked_tasks.__name__


def stored(name: str, *args: Any, version: int = 1, **kwargs: Any) -> Task:
    """A task that an earlier release has stored."""
    return a_task(func_path=f"{MODULE}.{name}", args=args, kwargs=kwargs, version=version)


async def problems_with(queue: AsyncTaskQueue, *tasks: Task) -> list[tuple[str, str, int]]:
    """Store the tasks; return the name of the function, the problem and the count of each problem."""
    await queue.storage.enqueue_many(tasks)
    report = await queue.check([MODULE])
    return [(_name(each), each.problem, each.count) for each in report.problems]


def _name(problem: CheckProblem) -> str:
    return problem.func_path.removeprefix(f"{MODULE}.")


async def fail(queue: AsyncTaskQueue) -> Task:
    """Let the next task fail for good."""
    (task,) = await queue.storage.reserve(1)
    await queue.storage.record([Failed(task.id, task.token, an_error())])
    return task


async def test_what_fits_is_no_problem(queue):
    found = await problems_with(
        queue,
        stored("add", 1),
        stored("add", 1, b=2),
        stored("report", "eu"),
        stored("newer", 1, version=2),
        stored("newer", 1, b=2, version=3),
        stored("unmarked"),
        a_task(func_path="checked.send", args=("ada",)),
        a_task(func_path="checked.old_send", kwargs={"to": "ada"}),
    )

    assert found == []
    assert (await queue.check([MODULE])).ok


async def test_each_kind_of_problem_is_counted_by_function_and_has_an_example(queue):
    first = stored("gone", 1)
    found = await problems_with(
        queue,
        first,
        stored("gone", 2),
        stored("add"),
        stored("add", 1, c=2),
        stored("report", "mars"),
        stored("newer", 1),
        stored("newer", 1, version=4),
        stored("newer", "x", "y", version=2),
        a_task(func_path="elsewhere.f"),
    )
    report = await queue.check([MODULE])
    (gone,) = [each for each in report.problems if each.problem == "missing"]

    assert sorted(found) == [
        ("add", "signature", 1),
        ("add", "signature", 1),
        ("elsewhere.f", "not run here", 1),
        ("gone", "missing", 2),
        ("newer", "newer version", 1),
        ("newer", "no upcaster", 1),
        ("newer", "upcaster", 1),
        ("report", "types", 1),
    ]
    assert gone.example == first.id or gone.count == 2
    assert (report.tasks, report.ok) == (9, False)
    assert all(each.advice for each in report.problems)


async def test_tasks_that_run_or_wait_for_a_retry_are_checked_and_ended_ones_are_not(queue):
    await queue.storage.enqueue_many([stored("gone", number) for number in range(3)])
    ended = await fail(queue)
    await queue.dead.delete(ended.id)
    (running,) = await queue.storage.reserve(1)
    report = await queue.check([MODULE])

    assert (await queue.get_task(running.id)).status is TaskStatus.RUNNING
    assert [(each.record, each.count) for each in report.problems] == [("task", 2)]


async def test_dead_letters_are_checked_as_a_retry_would_run_them_unless_they_are_left_out(queue):
    await queue.storage.enqueue_many([stored("gone", 1)])
    dead = await fail(queue)
    report = await queue.check([MODULE])
    without = await queue.check([MODULE], dead=False)

    (problem,) = report.problems
    assert (problem.record, problem.example, report.dead_letters) == ("dead letter", dead.id, 1)
    assert (without.problems, without.dead_letters) == ((), 0)


async def test_a_schedule_whose_call_does_not_fit_is_a_problem(queue):
    await queue.schedules.add("fits", f"{MODULE}.add", args=(1,), cron="0 3 * * *")
    await queue.schedules.add("sum", f"{MODULE}.add", cron="0 3 * * *")
    report = await queue.check([MODULE])

    (problem,) = report.problems
    assert (problem.record, problem.example, problem.problem) == ("schedule", "sum", "signature")
    assert report.schedules == 2


async def test_a_check_changes_nothing(queue):
    await queue.storage.enqueue_many([stored("gone", 1), stored("broken", 1)])
    await fail(queue)
    await queue.schedules.add("sum", f"{MODULE}.add", cron="0 3 * * *")
    before = await queue.list_tasks(), await queue.dead.list(), await queue.schedules.list()
    await queue.check([MODULE])

    assert (
        await queue.list_tasks(),
        await queue.dead.list(),
        await queue.schedules.list(),
    ) == before


async def test_a_declared_schedule_that_the_new_code_replaces_is_no_problem(memory_queue):
    await memory_queue.schedules.declare(checked_tasks)
    (declared,) = await memory_queue.schedules.list()
    report = await memory_queue.check([MODULE])

    assert declared.declared
    assert (report.ok, report.declared, report.schedules) == (True, 1, 0)


async def test_a_schedule_of_a_module_that_is_no_longer_named_is_a_problem(memory_queue):
    await memory_queue.schedules.declare(checked_tasks)
    report = await memory_queue.check([versioned_tasks.__name__])

    (problem,) = report.problems
    assert (problem.record, problem.problem) == ("schedule", "not run here")


async def test_a_declaration_that_would_stop_the_worker_is_a_problem(memory_queue):
    report = await memory_queue.check([wrong_schedules.__name__])

    (problem,) = report.problems
    assert (problem.record, problem.problem) == ("declared schedule", "declaration")
    assert "too many positional arguments" in problem.detail
    assert await memory_queue.schedules.list() == []


async def test_what_the_upcaster_raises_cannot_fill_the_report(memory_queue):
    found = await problems_with(memory_queue, *(stored("broken", number) for number in range(50)))

    assert len(found) <= 11
    assert sum(count for *_, count in found) == 50


async def test_a_report_has_a_bounded_number_of_problems(memory_queue):
    await memory_queue.storage.enqueue_many(stored(f"gone{number}") for number in range(1_020))
    report = await memory_queue.check([MODULE])

    assert (len(report.problems), report.omitted, report.tasks) == (1_000, 20, 1_020)


async def test_the_arguments_of_a_node_may_be_results_that_do_not_exist_yet(memory_queue):
    flow = Flow("nodes")
    number = flow.add("number", f"{MODULE}.add", 1)
    flow.add("typed", f"{MODULE}.report", number)
    flow.options(version=2).add("older", f"{MODULE}.newer", number)
    await memory_queue.start(flow)

    assert (await memory_queue.check([MODULE])).problems == ()


async def test_a_node_whose_number_of_arguments_does_not_fit_or_whose_undo_is_gone_is_a_problem(
    memory_queue,
):
    flow = Flow("nodes")
    number = flow.options(undo="other.undo").add("number", f"{MODULE}.add", 1)
    flow.add("many", f"{MODULE}.report", number, 2)
    await memory_queue.start(flow)
    report = await memory_queue.check([MODULE])

    assert {each.problem for each in report.problems} >= {"signature", "undo"}


async def test_what_is_signed_with_another_key_cannot_be_read():
    signed = MemoryStorage(settings=Settings(signing_key="k" * 40))
    async with signed, signed.another(settings=Settings()) as open_storage:
        await signed.enqueue(stored("add", 1))
        keyed = AsyncTaskQueue(signed)
        await keyed.schedules.add("sum", f"{MODULE}.add", args=(1,), cron="0 3 * * *")
        with_key = await keyed.check([MODULE])
        without_key = await AsyncTaskQueue(open_storage).check([MODULE])

    assert with_key.ok
    assert [(each.record, each.problem) for each in without_key.problems] == [
        ("schedule", "unreadable"),
        ("task", "unreadable"),
    ]


async def test_a_checkpoint_that_cannot_be_read_is_a_problem(memory_queue):
    storage = memory_queue.storage
    await storage.enqueue(stored("add", 1))
    (task,) = await storage.reserve(1)
    await storage.save_checkpoint(task.id, task.token, b"not a checkpoint")
    report = await memory_queue.check([MODULE])

    (problem,) = report.problems
    assert (problem.record, problem.example, report.checkpoints) == ("checkpoint", task.id, 1)


async def test_equal_calls_of_a_plain_function_are_compared_once(memory_queue, monkeypatch):
    compared: list[Task] = []
    monkeypatch.setattr(
        "omniq.operations.call_check._why_unfit", lambda task, callee: compared.append(task)
    )
    await memory_queue.storage.enqueue_many(stored("add", number) for number in range(100))
    await memory_queue.storage.enqueue_many(stored("add", number, b=1) for number in range(100))
    await check_stored(memory_queue.storage, FunctionCache([MODULE]))

    assert len(compared) == 2


async def test_progress_goes_up_to_the_number_of_records(memory_queue):
    await memory_queue.storage.enqueue_many(stored("add", number) for number in range(5))
    await fail(memory_queue)
    steps: list[tuple[int, int]] = []
    await check_stored(
        memory_queue.storage,
        FunctionCache([MODULE]),
        on_progress=lambda *step: steps.append(step),
    )

    assert steps[-1] == (5, 5)


async def test_modules_that_cannot_be_checked_are_refused(memory_queue):
    with pytest.raises(InvalidTask, match=r"expected a list, such as \['tasks'\]"):
        await memory_queue.check("tasks")
    with pytest.raises(SettingsError, match="there is no module no_such_module"):
        await memory_queue.check(["no_such_module"])


def test_a_blocking_queue_checks_what_this_program_has_imported():
    with TaskQueue("memory://") as queue:
        queue.enqueue(checked_tasks.add, 1)
        queue.enqueue(f"{MODULE}.gone")
        report = queue.check()

    assert isinstance(report, CheckReport)
    assert [_name(each) for each in report.problems] == ["gone"]
    assert report.as_dict()["problems"][0]["advice"]
