"""Celery's integration tests of its canvas, run as flows.

The mark `canvas` names the cases that a test stands for; docs/reference/canvas.md lists them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from omniq import AsyncTaskQueue, Flow, InvalidTask, TaskFailed, TaskStatus
from tests.canvas import page, tasks
from tests.canvas.cases import CASES, LEFT_OUT
from tests.canvas.graphs import ECHOES, GRAPHS, Graph, echoes
from tests.worker.recorder import PATIENCE

pytestmark = pytest.mark.timeout(120)
canvas = pytest.mark.canvas


@pytest.fixture
async def queue() -> AsyncIterator[AsyncTaskQueue]:
    tasks.CALLS.clear()
    tasks.ERRORS.clear()
    async with (
        AsyncTaskQueue("memory://") as queue,
        queue.worker(concurrency=20, base_retry_delay=0.001, poll_interval=0.05),
    ):
        yield queue


async def fails(queue: AsyncTaskQueue, flow: Flow) -> str:
    """Run a flow that fails; returns its error."""
    handle = await queue.start(flow)
    with pytest.raises(TaskFailed) as caught:
        await handle.result(30)
    assert await handle.wait(30) is TaskStatus.FAILED
    return str(caught.value)


@pytest.mark.parametrize(
    "graph", [pytest.param(graph, id=" ".join(graph.cases)) for graph in GRAPHS]
)
async def test_the_graph_gives_the_value(queue: AsyncTaskQueue, graph: Graph) -> None:
    handle = await queue.start(graph.build())

    assert await handle.result(60) == graph.result
    assert await handle.status() is TaskStatus.SUCCESS


@pytest.mark.parametrize(
    "groups", [pytest.param(groups, id=case) for case, groups in ECHOES.items()]
)
async def test_each_call_runs_once_and_groups_run_in_order(
    queue: AsyncTaskQueue, groups: tuple[str, ...]
) -> None:
    handle = await queue.start(echoes(*groups)())

    assert await handle.wait(30) is TaskStatus.SUCCESS
    calls = iter(tasks.CALLS)
    for group in groups:
        assert sorted(next(calls) for _ in group) == sorted(group)
    assert list(calls) == []


@canvas("chain.second_order_replace")
async def test_children_of_children_end_before_their_parents_go_on(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(tasks.outer)

    assert await handle.result(30) == "done"
    assert tasks.CALLS == [
        "into outer",
        "into middle",
        "inner",
        "out of middle",
        "out of outer",
    ]


@canvas("chain.chord_header_id_duplicated_on_rabbitmq_msg_duplication")
async def test_a_parent_that_runs_twice_has_each_child_once(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(tasks.maps_and_fails_once)

    assert await handle.result(30) == ["a", "b"]
    assert sorted(tasks.CALLS) == ["a", "b", "mapped"]


# Ids and handles


@canvas("chain.parent_ids", "group.parent_ids", "chord.parent_ids", "chord.parent_ids__OR")
async def test_ids_name_the_flow_and_the_node(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    first = flow.add("first", tasks.own_id)
    group = flow.map("group", tasks.own_id_after, [0, 1], *())
    flow.options(after=[first]).add("last", tasks.own_id_after, group)

    handle = await queue.start(flow)
    members, last = await handle.result(30)
    assert last == f"{handle.id}.last"
    assert [value for value, _ in members] == [0, 1]
    assert all(task_id.startswith(f"{handle.id}.group.") for _, task_id in members)
    assert (await handle.results())["first"] == f"{handle.id}.first"


@canvas("chain.groupresult_serialization")
async def test_another_handle_reads_the_results_of_a_flow(queue: AsyncTaskQueue) -> None:
    handle = await queue.start(Flow.group(tasks.add_to_each, [[1], [2]], 1))

    assert await handle.result(30) == [[2], [3]]
    assert await queue.flow(handle.id).result(30) == [[2], [3]]


@canvas("result_set.result_set", "result_set.result_set_built_via_add")
async def test_results_of_tasks_without_a_flow(queue: AsyncTaskQueue) -> None:
    handles = [await queue.enqueue(tasks.add, number, number) for number in (1, 2)]

    assert [await handle.result(30) for handle in handles] == [2, 4]


@canvas("result_set.result_set_error", "group.ready_with_exception")
async def test_one_of_two_fails_and_both_end(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    flow.add("bad", tasks.fail)
    flow.add("good", tasks.add, 1, 1)
    handle = await queue.start(flow)

    assert await handle.wait(30) is TaskStatus.FAILED
    statuses = {task.id.rpartition(".")[2]: task.status for task in await handle.nodes()}
    assert statuses == {"bad": TaskStatus.FAILED, "good": TaskStatus.SUCCESS}


@canvas("chord.priority", "chord.priority_chain")
async def test_nodes_have_their_own_priorities(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    first = flow.options(priority=3).add("first", tasks.identity, 1)
    flow.options(priority=5).add("second", tasks.identity, first)
    handle = await queue.start(flow)

    assert await handle.result(30) == 1
    assert [task.priority for task in await handle.nodes()] == [3, 5]


@canvas("chain.replace_chain_with_empty_chain")
async def test_an_empty_flow_is_refused(queue: AsyncTaskQueue) -> None:
    with pytest.raises(InvalidTask, match="empty"):
        await queue.start(Flow.chain())


# Callbacks


@canvas("chain.chain_replaced_with_a_chain_and_a_callback")
async def test_children_have_a_callback(queue: AsyncTaskQueue) -> None:
    flow = Flow.chain(
        (tasks.identity, "Hello "), (tasks.identity_and_echo, "called"), (tasks.add, "world")
    )

    assert await (await queue.start(flow)).result(30) == "Hello world"
    assert tasks.CALLS == ["called"]


@canvas("chain.chain_with_cb_replaced_with_chain_with_cb")
async def test_children_and_their_flow_have_callbacks(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    start = flow.add("start", tasks.identity, "Hello ")
    inner = flow.add("inner", tasks.identity_and_echo, start, "called")
    flow.add("callback", tasks.echo, flow.add("end", tasks.add, inner, "world"))

    assert await (await queue.start(flow)).result(30) == "Hello world"
    assert tasks.CALLS == ["called", "Hello world"]


@canvas("chain.chain_flattening_keep_links_of_inner_chain")
async def test_a_part_of_a_chain_has_a_callback(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    inner = flow.add("inner", tasks.add, flow.add("start", tasks.identity, "a"), "b")
    flow.add("callback", tasks.echo, inner)
    end = flow.add("end", tasks.add, inner, "c")
    flow.add("result", tasks.echo, end)
    handle = await queue.start(flow)

    assert await handle.wait(30) is TaskStatus.SUCCESS
    assert sorted(tasks.CALLS) == ["ab", "abc"]


def children_with_callbacks(func: Any, count: int, *, in_a_chain: bool) -> Flow:
    flow = Flow()
    before: list[Any] = []
    for number in range(count):
        node = flow.options(after=before).add(f"node-{number}", func, number)
        flow.options(after=[node]).add(f"callback-{number}", tasks.echo, f"after {number}")
        before = [node] if in_a_chain else []
    return flow


@pytest.mark.parametrize(
    "in_a_chain",
    [
        pytest.param(True, marks=canvas("chain.chain_children_with_callbacks")),
        pytest.param(False, marks=canvas("group.group_children_with_callbacks")),
    ],
)
async def test_each_of_many_nodes_has_a_callback(queue: AsyncTaskQueue, in_a_chain: bool) -> None:
    flow = children_with_callbacks(tasks.identity, 42, in_a_chain=in_a_chain)

    assert await (await queue.start(flow)).wait(30) is TaskStatus.SUCCESS
    assert sorted(tasks.CALLS) == sorted(f"after {number}" for number in range(42))


@canvas(
    "chain.chain_with_callback_child_replaced",
    "chain.chain_child_with_callback_replaced",
    "group.group_with_callback_child_replaced",
    "group.group_child_with_callback_replaced",
    "group.callback_called_by_group",
)
@pytest.mark.parametrize("is_for_all", [True, False])
async def test_a_callback_runs_once_after_a_node_with_children(
    queue: AsyncTaskQueue, is_for_all: bool
) -> None:
    flow = Flow()
    replaced = flow.add("replaced", tasks.add_by_a_child, 42, 1337)
    other = flow.add("other", tasks.identity, replaced)
    after = [replaced, other] if is_for_all else [replaced]
    flow.options(after=after).add("callback", tasks.echo, "called")
    handle = await queue.start(flow)

    assert await handle.wait(30) is TaskStatus.SUCCESS
    assert (await handle.results())["other"] == 42 + 1337
    assert tasks.CALLS == ["called"]


# Errors


async def errors(count: int) -> dict[str, int]:
    """How often `on_dead` was called for each function, when it was called that often in all."""
    deadline = time.monotonic() + PATIENCE
    while tasks.ERRORS.total() < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return dict(tasks.ERRORS)


@canvas("link_error.link_error", "link_error.link_error_using_signature")
async def test_an_error_calls_its_hook_once(queue: AsyncTaskQueue) -> None:
    handle = await queue.enqueue(tasks.fail)

    with pytest.raises(TaskFailed, match="expected"):
        await handle.result(30)
    assert await errors(1) == {"fail": 1}


@canvas("link_error.link_error_callback_retries")
async def test_what_runs_after_an_error_is_retried(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    bad = flow.add("bad", tasks.fail)
    flow.options(after_any=[bad]).add("clean", tasks.maps_and_fails_once)
    handle = await queue.start(flow)

    assert await handle.wait(30) is TaskStatus.FAILED
    assert await handle.results() == {"clean": ["a", "b"]}


@canvas("chain.chain_on_error")
async def test_the_first_error_ends_a_chain(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    first = flow.add("first", tasks.add, 1, 2)
    bad = flow.options(after=[first]).add("bad", tasks.fail)
    flow.options(after=[bad]).add("last", tasks.add, 3, 4)
    handle = await queue.start(flow)

    with pytest.raises(TaskFailed, match="expected"):
        await handle.result(30)
    assert await handle.results() == {"first": 3}
    skipped = await queue.get_result(f"{handle.id}.last")
    assert skipped is not None
    assert skipped.status is TaskStatus.CANCELLED
    assert skipped.reason == f"needs {handle.id}.bad, which failed"


@canvas(
    "chain.chain_replaced_with_a_chain_and_an_error_callback",
    "chain.chain_child_with_errback_replaced",
    "group.group_child_with_errback_replaced",
)
async def test_an_error_of_a_child_is_one_of_its_parent(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    start = flow.add("start", tasks.identity, "Hello ")
    bad = flow.options(after=[start]).add("bad", tasks.fail_by_a_child)
    flow.add("last", tasks.add, bad, " never added")

    assert "expected" in await fails(queue, flow)
    assert await errors(2) == {"fail": 1, "fail_by_a_child": 1}


@canvas("chain.chain_with_eb_replaced_with_chain_with_eb")
async def test_an_error_of_a_child_and_its_flow_have_callbacks(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    bad = flow.add("bad", tasks.fail_by_a_child)
    last = flow.add("last", tasks.add, bad, " never added")
    flow.options(after_any=[last]).add("callback", tasks.echo, "called")

    await fails(queue, flow)
    assert tasks.CALLS == ["called"]
    assert await errors(2) == {"fail": 1, "fail_by_a_child": 1}


def failing(count: int, *, in_a_chain: bool, succeeding: int = 0) -> Flow:
    flow = Flow()
    before: list[Any] = []
    flow.map("good", tasks.identity, range(succeeding))
    for number in range(count):
        node = flow.options(after=before).add(f"bad-{number}", tasks.fail)
        before = [node] if in_a_chain else []
    return flow


@canvas("chain.chain_children_with_errbacks")
async def test_only_the_first_node_of_a_failing_chain_runs(queue: AsyncTaskQueue) -> None:
    await fails(queue, failing(42, in_a_chain=True))

    assert await errors(1) == {"fail": 1}


@canvas("group.group_children_with_errbacks", "group.errback_called_by_group_fail_multiple")
async def test_each_failing_member_calls_its_hook(queue: AsyncTaskQueue) -> None:
    await fails(queue, failing(42, in_a_chain=False, succeeding=24))

    assert await errors(42) == {"fail": 42}


@canvas("chain.chain_with_errback_child_replaced", "group.group_with_errback_child_replaced")
async def test_a_node_fails_beside_one_with_children(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    replaced = flow.add("replaced", tasks.add_by_a_child, 42, 1337)
    flow.add("bad", tasks.fail_with, replaced)

    assert "expected, for 1379" in await fails(queue, flow)
    assert await errors(1) == {"fail_with": 1}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("bad", "good"), marks=canvas("group.errback_called_by_group_fail_first")),
        pytest.param(("good", "bad"), marks=canvas("group.errback_called_by_group_fail_last")),
    ],
)
async def test_a_member_fails_and_the_callback_runs_once(
    queue: AsyncTaskQueue, names: tuple[str, str]
) -> None:
    flow = Flow()
    nodes = [
        flow.add(name, tasks.fail) if name == "bad" else flow.add(name, tasks.identity, 42)
        for name in names
    ]
    flow.options(after_any=nodes).add("callback", tasks.echo, "called")

    await fails(queue, flow)
    assert tasks.CALLS == ["called"]
    assert await errors(1) == {"fail": 1}


@canvas("chord.chord_on_error")
async def test_results_of_members_are_kept_when_one_fails(queue: AsyncTaskQueue) -> None:
    flow = Flow()
    header = [flow.add("a", tasks.add, 1, 2), flow.add("b", tasks.add, 3, 4)]
    flow.add("body", tasks.total, [*header, flow.add("bad", tasks.fail)])
    handle = await queue.start(flow)

    assert await handle.wait(30) is TaskStatus.FAILED
    assert await handle.results() == {"a": 3, "b": 7}
    assert await errors(1) == {"fail": 1}


def simple(flow: Flow, after: list[Any]) -> Any:
    return flow.options(after=after).add("bad", tasks.fail)


def chain(flow: Flow, after: list[Any]) -> Any:
    first = flow.options(after=after).add("first", tasks.identity, 42)
    bad = flow.options(after=[first]).add("bad", tasks.fail)
    return flow.options(after=[bad]).add("last", tasks.identity, 42)


def chain_tail(flow: Flow, after: list[Any]) -> Any:
    first = flow.options(after=after).add("first", tasks.identity, 42)
    return flow.options(after=[first]).add("bad", tasks.fail)


def group(flow: Flow, after: list[Any]) -> Any:
    good = flow.options(after=after).add("good", tasks.identity, 42)
    return [good, flow.options(after=after).add("bad", tasks.fail)]


@pytest.mark.parametrize("is_body", [False, True], ids=["header", "body"])
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            part,
            marks=canvas(
                f"chord.error_propagates_to_chord_from_{part.__name__}",
                f"chord.immutable_errback_called_by_chord_from_{part.__name__}",
            ),
        )
        for part in (simple, chain, chain_tail, group)
    ],
)
async def test_an_error_within_a_chord_fails_it_and_its_callback_runs_once(
    queue: AsyncTaskQueue, part: Callable[[Flow, list[Any]], Any], is_body: bool
) -> None:
    flow = Flow()
    if is_body:
        last = part(flow, [flow.add("header", tasks.identity, 42)])
    else:
        last = flow.add("body", tasks.identity, part(flow, []))
    after = last if isinstance(last, list) else [last]
    flow.options(after_any=after).add("callback", tasks.echo, "called")

    assert "expected" in await fails(queue, flow)
    assert tasks.CALLS == ["called"]
    assert await errors(1) == {"fail": 1}


@canvas("chord.immutable_errback_called_by_chord_from_group_fail_multiple")
async def test_many_members_fail_and_the_callback_of_the_chord_runs_once(
    queue: AsyncTaskQueue,
) -> None:
    flow = failing(42, in_a_chain=False, succeeding=24)
    body = flow.options(after=[f"bad-{number}" for number in range(42)]).add(
        "body", tasks.identity, 42
    )
    flow.options(after_any=[body]).add("callback", tasks.echo, "called")

    await fails(queue, flow)
    assert tasks.CALLS == ["called"]
    assert await errors(42) == {"fail": 42}


@canvas("chord.error_propagates_from_chord", "chord.error_propagates_from_chord2")
@pytest.mark.parametrize("is_last", [False, True])
async def test_an_error_before_or_in_the_last_group(queue: AsyncTaskQueue, is_last: bool) -> None:
    flow = Flow()
    start = flow.add("start", tasks.add, 1, 1)
    second = flow.add("second", tasks.add if is_last else tasks.fail_with, start, *([1] * is_last))
    flow.add("left", tasks.add, second, 1)
    flow.add("right", tasks.fail_with if is_last else tasks.identity, second)

    assert "expected" in await fails(queue, flow)
    assert sum((await errors(1)).values()) == 1


@canvas(
    "chord.chord_error_propagation_with_different_body_types",
    "chord.chord_error_in_nested_chain_does_not_crash",
    "chord.chord_unlock_with_failed_task_in_nested_chain_member",
)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("body", ["call", "chain", "group"])
async def test_an_error_in_a_header_cancels_a_body_of_any_kind(
    queue: AsyncTaskQueue, body: str, is_nested: bool
) -> None:
    flow = Flow()
    bad = flow.add("bad", tasks.fail)
    if is_nested:
        pair = flow.options(after=[bad]).map("pair", tasks.identity, [2, 3])
        bad = flow.options(after=[pair]).add("four", tasks.identity, 4)
    header = [flow.add("good", tasks.add, 15, 7), bad]
    if body == "group":
        flow.options(after=header).map("body", tasks.echo, ["a", "b"])
    else:
        result = flow.add("body", tasks.identity, header)
        if body == "chain":
            flow.add("more", tasks.identity, result)

    assert "expected" in await fails(queue, flow)
    assert tasks.CALLS == []


# The table


def test_each_case_has_a_test_or_a_reason() -> None:
    covered = set(page.tests_of_cases())

    assert covered | set(LEFT_OUT) == set(CASES)
    assert covered & set(LEFT_OUT) == set()
    assert len(covered) >= 60


def test_the_page_matches_the_tests() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run: python -m tests.canvas.page"
