"""Flows run by workers: chains, fan-out and fan-in, maps, children, events, sagas, cancel and retry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

import pytest

from omniq import (
    AsyncTaskQueue,
    Flow,
    InvalidTask,
    Results,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    TaskQueue,
    TaskStatus,
)
from omniq.testing.clock import ManualClock
from omniq.testing.manual import AsyncManualQueue
from tests.worker import flow_tasks as tasks
from tests.worker.conftest import Store
from tests.worker.recorder import PATIENCE

pytestmark = [pytest.mark.timeout(120), pytest.mark.deep_on("file")]


@pytest.fixture
async def queue(store: Store) -> AsyncIterator[AsyncTaskQueue]:
    tasks.UNDONE.clear()
    tasks.RUNS.clear()
    async with AsyncTaskQueue(store.another()) as queue:
        yield queue


def worker(queue: AsyncTaskQueue) -> Any:
    return queue.worker(concurrency=4, base_retry_delay=0.001, poll_interval=0.05)


async def until(is_met: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await is_met():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_flow_maps_over_a_result_and_adds_up(queue: AsyncTaskQueue) -> None:
    flow = Flow("import")
    pages = flow.add("list", tasks.numbers, 5)
    parts = flow.map("part", tasks.double, pages)
    flow.add("sum", tasks.total, parts)

    handle = await queue.start(flow)
    async with worker(queue):
        assert await handle.result(30) == 20
    assert await handle.status() is TaskStatus.SUCCESS
    names = [task.id.removeprefix(f"{handle.id}.") for task in await handle.nodes()]
    assert names == ["list", "part", "sum"]
    assert await handle.results() == {
        "list": [0, 1, 2, 3, 4],
        "part": [0, 2, 4, 6, 8],
        "sum": 20,
    }


async def test_chains_and_groups(queue: AsyncTaskQueue) -> None:
    chain = await queue.start(Flow.chain((tasks.numbers, 4), tasks.total, (tasks.add, 10)))
    group = await queue.start(Flow.group(tasks.double, [1, 2, 3]))
    empty = await queue.start(Flow.group(tasks.double, []))

    async with worker(queue):
        assert await chain.result(30) == 16
        assert await group.result(30) == [2, 4, 6]
        assert await empty.result(30) == []


async def test_results_stand_in_lists_and_keywords(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    first, second = flow.add("a", tasks.double, 1), flow.add("b", tasks.double, 2)
    flow.add("both", tasks.listed, [first, second, 7], label=">")

    handle = await queue.start(flow)
    async with worker(queue):
        assert await handle.result(30) == ">[2, 4, 7]"


async def test_a_task_waits_for_others_without_a_flow(queue: AsyncTaskQueue) -> None:
    flow = await queue.start(Flow.group(tasks.double, [1]))
    other = await queue.enqueue(tasks.double, 5)
    later = await queue.options(after=[flow, other]).enqueue(tasks.double, 8)

    assert await later.status() is TaskStatus.PENDING
    async with worker(queue):
        assert await later.result(30) == 16


async def test_what_needs_a_failed_node_is_cancelled_and_others_go_on(
    queue: AsyncTaskQueue,
) -> None:
    flow = Flow()
    bad = flow.add("bad", tasks.fail, "broken")
    flow.add("needs", tasks.double, bad)
    flow.add("other", tasks.note, "other")
    flow.options(after_any=["needs"]).add("clean", tasks.note, "clean")

    handle = await queue.start(flow)
    async with worker(queue):
        assert await handle.wait(30) is TaskStatus.FAILED
    assert sorted(tasks.RUNS) == ["clean", "other"]
    needs = await queue.get_result(f"{handle.id}.needs")
    assert needs is not None
    assert needs.reason == f"needs {handle.id}.bad, which failed"
    with pytest.raises(TaskFailed, match="broken"):
        await handle.result()
    assert await handle.results() == {"other": "other", "clean": "clean"}


async def test_a_failed_flow_is_retried_from_the_failed_node(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    first = flow.add("first", tasks.numbers, 3)
    summed = flow.add("sum", tasks.total, first)
    once = flow.add("once", tasks.fail_once, summed)
    flow.add("last", tasks.double, once)
    handle = await queue.start(flow)

    async with worker(queue):
        assert await handle.wait(30) is TaskStatus.FAILED
        assert await handle.retry()
        assert await handle.result(30) == 6
        assert await handle.retry(from_="last")
        assert await handle.result(30) == 6
    assert tasks.RUNS == ["once once", "once once"]
    with pytest.raises(InvalidTask, match="no node"):
        await handle.retry(from_="nowhere")


async def test_a_saga_undoes_what_has_succeeded_in_reverse_order(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    flow.options(undo=tasks.undo).add("hotel", tasks.note, "hotel")
    flow.options(undo=tasks.undo, after=["hotel"]).add("flight", tasks.note, "flight")
    flow.options(after=["flight"]).add("pay", tasks.fail, "no money")

    handle = await queue.start(flow)
    async with worker(queue):
        assert await handle.wait(30) is TaskStatus.FAILED
    assert tasks.UNDONE == ["flight", "hotel"]
    with pytest.raises(InvalidTask, match="undone"):
        await handle.retry()


async def test_a_saga_that_succeeds_or_is_cancelled(queue: AsyncTaskQueue) -> None:
    good, bad = Flow(), Flow()
    for flow in (good, bad):
        flow.options(undo=tasks.undo).add("hotel", tasks.note, "hotel")
        if flow is bad:
            flow.options(after=["hotel"]).add("wait", tasks.approve, 9)

    succeeded, cancelled = await queue.start(good), await queue.start(bad)
    async with worker(queue):
        assert await succeeded.wait(30) is TaskStatus.SUCCESS
        assert tasks.UNDONE == []

        async def is_waiting() -> bool:
            return await queue.get_task(f"{cancelled.id}.wait.approved") is not None

        await until(is_waiting)
        assert await cancelled.cancel()
        with pytest.raises(TaskCancelled):
            await cancelled.result(30)

        async def is_undone() -> bool:
            return bool(tasks.UNDONE)

        await until(is_undone)
    assert tasks.UNDONE == ["hotel"]


@pytest.mark.parametrize("saga", [tasks.saga_on_loop, tasks.saga_in_thread])
async def test_the_steps_of_a_task_that_fails_for_good_are_undone_once(
    queue: AsyncTaskQueue, saga: Any
) -> None:
    handle = await queue.enqueue(saga)

    async with worker(queue):
        with pytest.raises(TaskFailed, match="no money"):
            await handle.result(30)
    assert tasks.RUNS == ["hotel", "flight"]
    assert tasks.UNDONE == ["flight", "hotel"]


@pytest.mark.parametrize(
    "function", [tasks.add_pages, tasks.add_pages_in_thread, tasks.add_pages_in_process]
)
async def test_a_function_reads_very_many_results_in_pages(
    queue: AsyncTaskQueue, function: Callable[..., Any]
) -> None:
    flow = Flow()
    # More than one page.
    numbers = flow.map("number", tasks.double, range(210))
    flow.add("sum", function, Results.of(numbers), start=1)

    handle = await queue.start(flow)
    async with worker(queue):
        assert await handle.result(PATIENCE) == 1 + sum(range(0, 420, 2))


async def test_results_in_pages_are_of_the_annotated_type() -> None:
    async with AsyncTaskQueue("memory://") as queue, worker(queue):
        flow = Flow()
        flow.add("days", tasks.days, Results.of(flow.map("day", tasks.a_day, [3, 1, 2])))
        # The result of one node is a list, too; a parameter annotated so reads any placeholder in pages.
        four: Any = flow.add("list", tasks.numbers, 4)
        flow.add("sum", tasks.add_pages, four)

        handle = await queue.start(flow)
        assert await handle.results(PATIENCE) == {
            "day": [timedelta(days=each) for each in (3, 1, 2)],
            "days": [3, 1, 2],
            "list": [0, 1, 2, 3],
            "sum": 6,
        }
        # Without a flow, a list of values.
        direct = await queue.enqueue(tasks.add_pages, Results.of([1, 2]))
        assert await direct.result(PATIENCE) == 3


async def test_results_of_another_parameter_are_refused() -> None:
    flow = Flow()
    numbers = flow.map("number", tasks.double, [1])
    flow.add("sum", tasks.total, Results.of(numbers))  # type: ignore[call-overload]

    async with AsyncTaskQueue("memory://") as queue:
        with pytest.raises(InvalidTask, match=r"not annotated Results\[…\]"):
            await queue.start(flow)


async def test_steps_cannot_be_undone_in_a_child_process() -> None:
    async with AsyncTaskQueue("memory://") as queue:
        handle = await queue.enqueue(tasks.saga_in_process)
        async with worker(queue):
            with pytest.raises(TaskFailed, match="undo needs a task in the worker's own process"):
                await handle.result(30)


# Children


@pytest.mark.parametrize("parent", tasks.PARENTS, ids=lambda func: func.__name__)
async def test_a_parent_calls_maps_and_waits_wherever_it_runs(
    queue: AsyncTaskQueue, parent: Any
) -> None:
    handle = await queue.enqueue(parent, 4)

    async with worker(queue):
        assert await handle.result(60) == "8 [2, 4, 6] [20, 40]"


async def test_many_parents_need_no_slots_while_they_wait(queue: AsyncTaskQueue) -> None:
    handles = await queue.enqueue_many(tasks.parent_on_loop, range(12))

    async with queue.worker(concurrency=2, poll_interval=0.05):
        results = [await handle.result(60) for handle in handles]
    assert results[11] == "22 [2, 4, 6] [20, 40]"


async def test_enough_of_several_and_a_child_that_is_left_behind(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(tasks.first_of)

    async with worker(queue):

        async def has_returned() -> bool:
            task = await queue.get_task(handle.id)
            return task is not None and task.workflow is not None and task.workflow.has_returned

        await until(has_returned)
        # It ends when its children have.
        assert await handle.status() is TaskStatus.PENDING
        assert await queue.send_event("approved", True, to=f"{handle.id}.never")
        assert await handle.result(30) == [8]


@pytest.mark.parametrize("catches", [True, False])
async def test_children_that_fail_are_an_error_of_the_parent(
    queue: AsyncTaskQueue, catches: bool
) -> None:
    handle = await queue.enqueue(tasks.of_failing, catches)

    async with worker(queue):
        if catches:
            assert (await handle.result(30)).split()[1] in ("a", "b")
        else:
            with pytest.raises(TaskFailed, match="did not succeed"):
                await handle.result(30)


async def test_a_task_that_only_spawns_ends_after_its_children(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(tasks.spawns_only)

    async with worker(queue):
        assert await handle.result(30) == "returned"
    left = await queue.get_result(f"{handle.id}.left")
    assert left is not None
    assert left.result == 2


async def test_a_task_waits_for_another_task(queue: AsyncTaskQueue) -> None:
    other = await queue.enqueue(tasks.double, 4)
    handle = await queue.enqueue(tasks.waits_for_other, other.id)
    lost = await queue.enqueue(tasks.waits_for_other, "nowhere")

    async with worker(queue):
        assert await handle.result(30) == 9
        with pytest.raises(TaskFailed, match="nowhere has no record"):
            await lost.result(30)


# Events


async def test_an_event_may_come_before_or_after_the_wait(queue: AsyncTaskQueue) -> None:
    early = await queue.enqueue(tasks.approve, 3)
    assert await queue.send_event("approved", False, to=early)
    late = await queue.enqueue(tasks.approve, 3)

    async with worker(queue):
        assert await early.result(30) == "no"

        async def is_waiting() -> bool:
            return await queue.get_task(f"{late.id}.approved") is not None

        await until(is_waiting)
        with pytest.raises(InvalidTask, match="expected bool"):
            await queue.send_event("approved", "yes", to=late)
        assert await queue.send_event("approved", True, to=late)
        assert not await queue.send_event("approved", False, to=late)
        assert await late.result(30) == "yes"
    assert not await queue.send_event("approved", True, to=late)
    with pytest.raises(TaskNotFound):
        await queue.send_event("approved", True, to="nowhere")


async def test_a_fact_is_for_all_that_wait_for_it(queue: AsyncTaskQueue) -> None:
    handles = await queue.enqueue_many(tasks.waits_for_fact, ["order-7.paid"] * 3)

    async with worker(queue):
        assert await queue.send_event("order-7.paid", 12)
        assert [await handle.result(30) for handle in handles] == [12, 12, 12]


async def test_an_approval_times_out_after_thirty_days() -> None:
    clock = ManualClock()
    async with AsyncManualQueue(clock=clock) as queue:
        handle = await queue.enqueue(tasks.approve, 30)
        await queue.run()
        assert await handle.status() is TaskStatus.PENDING

        clock.advance(30 * 86_400)
        await queue.run()
        assert await handle.result(0) == "too late"
        assert not await queue.send_event("approved", True, to=handle)


# Cancel, unique, size


async def test_a_flow_is_cancelled_as_a_whole(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    flow.add("wait", tasks.approve, 9)
    flow.options(after=["wait"]).add("next", tasks.note, "next")
    handle = await queue.start(flow)

    assert await handle.cancel()
    async with worker(queue):
        assert await handle.wait(30) is TaskStatus.CANCELLED
    assert tasks.RUNS == []


async def test_one_flow_of_a_unique_key_at_a_time(queue: AsyncTaskQueue) -> None:
    flow = Flow.group(tasks.double, [1, 2])
    first, second = await queue.start(flow, unique="u"), await queue.start(flow, unique="u")
    assert first.id == second.id

    async with worker(queue):
        await first.wait(30)
    third = await queue.start(flow, unique="u")
    assert third.id != first.id


async def test_a_large_flow_starts_when_all_of_it_is_stored(queue: AsyncTaskQueue) -> None:
    handle = await queue.start(Flow.group(tasks.double, range(1_300)))

    async with queue.worker(concurrency=50, poll_interval=0.05):
        assert await handle.result(90) == [2 * number for number in range(1_300)]


def test_flows_from_blocking_code() -> None:
    with TaskQueue("memory://") as queue:
        handle = queue.start(Flow.chain((tasks.numbers, 3), tasks.total))
        with queue.worker(concurrency=2, poll_interval=0.05):
            assert handle.result(30) == 3
            assert handle.status() is TaskStatus.SUCCESS
            assert queue.flow(handle.id).results() == {"numbers": [0, 1, 2], "total": 3}
            waiting = queue.enqueue(tasks.approve, 3)
            assert queue.send_event("approved", True, to=waiting)
            assert waiting.result(30) == "yes"


# Bad input


def stand_in_of_another_flow() -> None:
    Flow().add("x", tasks.double, Flow().add("a", tasks.double, 1))


def the_same_name_twice() -> None:
    flow = Flow()
    flow.add("a", tasks.double, 1)
    flow.add("a", tasks.double, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (stand_in_of_another_flow, "another flow"),
        (the_same_name_twice, "in this flow already"),
        (lambda: Flow().add("a.b", tasks.double, 1), "node 'a.b'"),
        (lambda: Flow().add("_a", tasks.double, 1), "node '_a'"),
        (lambda: Flow().add("a", tasks.double, 1) + 1, "which has not run"),
        (lambda: Flow().options(after=["gone"]), "expected a node"),
        (lambda: Flow().options(interval=5), "cannot have it"),
        (lambda: Flow().options(unique="x"), "cannot have it"),
        (lambda: Flow().map("a", tasks.double, cast(Any, 5)), "expected a list"),
        (lambda: Flow(on_failure=cast(Any, "explode")), "on_failure"),
    ],
)
def test_bad_flows_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidTask, match=words):
        make()


async def test_flows_that_cannot_be_stored_are_refused_before_anything_is_written() -> None:
    async with AsyncTaskQueue("memory://") as queue:
        wrong = Flow()
        wrong.add("a", cast(Any, tasks.double), 1, 2)
        for flow, words in ((Flow(), "empty"), (wrong, "too many positional arguments")):
            with pytest.raises(InvalidTask, match=words):
                await queue.start(flow)
        with pytest.raises(InvalidTask, match="has no record"):
            await queue.options(after=["gone"]).enqueue(tasks.double, 1)
        assert await queue.list_tasks() == []
