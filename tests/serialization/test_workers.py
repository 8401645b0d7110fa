"""A worker makes the arguments from the annotations of its function, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from omniq import AsyncTaskQueue, SerializationError, Task, TaskFailed
from omniq.tasks.annotations import converter_of
from omniq.tasks.arguments import FunctionTypes
from tests.serialization import sample_tasks
from tests.serialization.kinds import KINDS, Color, Contact, User
from tests.serialization.sample_tasks import RUNS, Intruder, Order


@pytest.fixture
async def queue() -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


@pytest.fixture(autouse=True)
def _no_runs() -> Iterator[None]:
    RUNS.clear()
    yield
    RUNS.clear()


async def run(queue: AsyncTaskQueue, func: Any, *args: Any, **kwargs: Any) -> Any:
    handle = await queue.enqueue(func, *args, **kwargs)
    await queue.worker().run_until_empty()
    return await handle.result(timeout=10)


async def test_an_async_function_gets_objects_and_returns_one(queue):
    assert await run(queue, sample_tasks.ship, Order(1)) == Order(2)
    assert [Order(1)] == RUNS


async def test_a_function_in_a_thread_makes_its_arguments_there(queue):
    order, user = Order(1, Color.BLUE), User("ada", None)  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match=r"user\.address: expected Address"):
        await queue.enqueue(sample_tasks.ship_in_thread, order, user=user)

    assert await run(queue, sample_tasks.ship_in_thread, order) == order
    ((attempt, received, nobody, thread),) = RUNS
    assert (attempt, received, nobody, thread) == (1, order, None, "omniq-task")


@pytest.mark.timeout(120)
async def test_a_child_process_makes_them_too(queue):
    contact = Contact(mail="a@b", color=Color.RED, files=[Path("x")])

    result = await run(queue, sample_tasks.ship_in_process, Order(1), contact)

    assert result == {"1": contact}


@pytest.mark.timeout(120)
async def test_a_result_of_a_child_that_is_of_another_class_ends_the_task(queue):
    with pytest.raises(TaskFailed, match="result: expected Order, got User"):
        await run(queue, sample_tasks.returns_other_in_process)


async def test_the_result_of_a_step_has_its_type_in_later_runs(queue):
    assert await run(queue, sample_tasks.in_steps, 1) == Order(2)
    assert [Order(1), Order(2), Order(2)] == RUNS


async def test_a_step_with_an_object_of_another_class_ends_the_task(queue):
    with pytest.raises(TaskFailed, match=r"the result of step 'first' cannot be stored.*a Invoice"):
        await run(queue, sample_tasks.returns_subclass_in_step)


async def test_each_of_several_arguments_is_made(queue):
    assert await run(queue, sample_tasks.several, Order(1), Order(2)) == [Order(1), Order(2)]
    assert await run(queue, sample_tasks.positional, 1, a=Color.RED, b=Color.BLUE) is Color.RED
    assert [(Order(1), Order(2)), (1, {"a": Color.RED, "b": Color.BLUE})] == RUNS


async def test_none_is_allowed_where_it_is_the_default(queue):
    assert await run(queue, sample_tasks.implicit_optional, None) is None
    assert await run(queue, sample_tasks.implicit_optional, Path("a")) == Path("a")


async def test_an_annotation_that_cannot_be_resolved_means_plain_data_and_the_others_count(queue):
    assert await run(queue, sample_tasks.half_resolved, {"a": 1}, Order(1)) == {"a": 1}
    await run(queue, sample_tasks.broken_annotation, {"a": 1})

    assert [({"a": 1}, Order(1)), {"a": 1}] == RUNS


async def test_a_decorated_function_has_the_types_of_the_wrapped_one(queue):
    assert await run(queue, sample_tasks.decorated, Order(1), times=2) == [Order(1), Order(1)]


async def test_an_awaitable_that_is_returned_has_the_type_of_its_value(queue):
    assert await run(queue, sample_tasks.returns_awaitable, Order(1)) == Order(2)


async def test_a_plain_call_from_another_program_is_made_into_objects(queue):
    path = f"{sample_tasks.__name__}.ship"
    handle = await queue.enqueue(path, {"number": 4, "color": "blue"})
    await queue.worker(allow=[sample_tasks.__name__]).run_until_empty()

    assert [Order(4, Color.BLUE)] == RUNS
    assert await handle.result(timeout=30) == {"number": 5, "color": "blue"}
    assert await queue.handle(handle.id, sample_tasks.ship).result(timeout=30) == Order(
        5, Color.BLUE
    )


@pytest.mark.parametrize(
    ("func", "stored"),
    [(sample_tasks.returns_plain_data, {"number": 3}), (sample_tasks.returns_none, None)],
)
async def test_plain_data_that_does_not_fit_the_annotation_is_stored_all_the_same(
    queue, func, stored
):
    handle = await queue.enqueue(func)
    await queue.worker().run_until_empty()

    assert (await queue.get_result(handle.id)).result == stored


async def test_a_stored_result_that_does_not_fit_is_an_error_of_the_reader(queue):
    with pytest.raises(
        SerializationError, match="returns_none: result: expected Order, got NoneType"
    ):
        await run(queue, sample_tasks.returns_none)


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (sample_tasks.returns_subclass, "result: a Invoice would be read as Order"),
        (sample_tasks.returns_other, "result: expected Order, got User"),
    ],
)
async def test_an_object_that_is_not_of_the_declared_class_ends_the_task(queue, func, message):
    handle = await queue.enqueue(func)
    await queue.worker().run_until_empty()

    with pytest.raises(TaskFailed, match=message):
        await handle.result(timeout=30)
    (letter,) = await queue.dead.list()
    assert letter.failure_reason == "unserialisable"


HOSTILE: list[Any] = [
    {"__class__": "tests.serialization.sample_tasks.Intruder", "number": 1},
    {"py/object": "tests.serialization.sample_tasks.Intruder", "number": 1},
    {"type": "Intruder", "number": 1, "$type": "Intruder", "kind": "Intruder"},
    {"number": {"__reduce__": ["os.system", "true"]}},
    {"number": 1, "color": {"__class__": "Intruder"}},
    {"number": 1, "__post_init__": "x", "__dict__": {}},
    "tests.serialization.sample_tasks.Intruder",
    ["Intruder", {"number": 1}],
    [[[[]]]],
    b"\x80\x04",
    5,
    None,
]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
async def test_a_hostile_record_makes_no_type_that_the_function_does_not_name(queue, value):
    Intruder.made = 0
    await queue.storage.enqueue(
        Task(id="t", func_path=f"{sample_tasks.__name__}.ship", args=(value,))
    )
    await queue.worker(allow=[sample_tasks.__name__]).run_until_empty()

    result = await queue.get_result("t")
    assert Intruder.made == 0
    assert all(type(received) is Order for received in RUNS)
    if not RUNS:
        # A retry does not help, and the sentence says which argument it is.
        assert (result.attempts, result.error.category) == (1, "permanent")
        assert result.error.message.startswith(f"{sample_tasks.__name__}.ship: order")
        assert [letter.failure_reason for letter in await queue.dead.list()] == ["permanent"]


plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["name", "number", "kind", "__class__", "type"]), inner)
    ),
    max_leaves=8,
)


@given(value=plain_data)
@settings(max_examples=120, deadline=None)
def test_any_data_is_made_into_each_declared_type_or_refused(value):
    for kind, (annotation, _) in KINDS.items():
        note(kind)
        converter = converter_of(annotation)

        try:
            made = converter.load(value, "value")
            # What was made is a value of the annotation: it is written and read like any other.
            converter.dump(made, "value")
        except SerializationError as error:
            assert str(error)  # noqa: PT017 - much of the data fits


def test_a_function_of_plain_data_has_nothing_to_convert():
    for func in (sample_tasks.add, sample_tasks.fetch, sample_tasks.anything):
        types = FunctionTypes(func, "f")
        assert (types.converts_arguments, types.result) == (False, None)


SCRIPT = """
from dataclasses import dataclass
from omniq import TaskQueue, task

@dataclass
class Order:
    number: int

@task
def ship(order: Order) -> Order:
    assert type(order) is Order
    return Order(order.number + 1)

@task(executor="process")
def ship_in_process(order: Order) -> Order:
    assert type(order) is Order
    return Order(order.number + 1)

if __name__ == "__main__":
    with TaskQueue("sqlite:///tasks.db") as queue:
        handles = [queue.enqueue(ship, Order(1)), queue.enqueue(ship_in_process, Order(2))]
        with queue.worker():
            print([handle.result(timeout=30) for handle in handles])
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_classes_of_a_script_work(tmp_path):
    (tmp_path / "shop.py").write_text(SCRIPT)

    done = subprocess.run(
        [sys.executable, "shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.stdout == "[Order(number=2), Order(number=3)]\n", done.stderr
