"""A call is checked against the signature of its function before anything is written."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pydantic
import pytest

from omniq import AsyncTaskQueue, InvalidTask, SerializationError
from omniq.tasks.arguments import FunctionTypes
from tests.serialization import sample_tasks
from tests.serialization.kinds import ECHOES, Color, Node, User
from tests.serialization.sample_tasks import Invoice, Order


@pytest.fixture
async def queue() -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


WRONG_CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (sample_tasks.add, (), {}, r"add: missing a required argument: 'a'; it takes \(a, b=2\)"),
    (sample_tasks.add, (1, 2, 3), {}, r"too many positional arguments; it takes \(a, b=2\)"),
    (sample_tasks.add, (1,), {"a": 1}, "multiple values for argument 'a'"),
    (
        sample_tasks.add,
        (),
        {"a": 1, "c": 2},
        r"unexpected keyword argument 'c'; it takes \(a, b=2\)",
    ),
    (
        sample_tasks.add,
        (1,),
        {"delay": 5},
        r"delay is an option: queue\.options\(delay=5\)\.enqueue",
    ),
    (sample_tasks.add, (1,), {"queue": "x"}, r"queue is an option: queue\.options\(queue=…\)"),
    (
        sample_tasks.add,
        (1,),
        {"countdown": 5},
        r"countdown is an option: queue\.options\(delay=5\)",
    ),
    (sample_tasks.fetch, ("x",), {}, "missing a required argument: 'depth'"),
    (sample_tasks.fetch, ("x", 1), {}, "too many positional arguments"),
    (
        sample_tasks.fetch,
        ("x",),
        {"deep": 1},
        "unexpected keyword argument 'deep'; did you mean 'depth'?",
    ),
    (
        sample_tasks.ship_in_thread,
        (),
        {},
        r"missing a required argument: 'order'; it takes \(order",
    ),
    (sample_tasks.positional, (), {"a": Color.RED}, "missing a required argument: 'a'"),
    (sample_tasks.keywords, (1,), {}, "missing required arguments: 'b', 'c'; it takes"),
]


@pytest.mark.parametrize(("func", "args", "kwargs", "message"), WRONG_CALLS)
async def test_arguments_that_do_not_fit_are_refused_by_name(queue, func, args, kwargs, message):
    with pytest.raises(InvalidTask, match=message):
        await queue.enqueue(func, *args, **kwargs)
    with pytest.raises(InvalidTask, match=message):
        await queue.enqueue_many([(func, args, kwargs)])
    with pytest.raises(InvalidTask, match=message):
        await queue.schedules.add("s", func, args=args, kwargs=kwargs, interval=60)

    assert await queue.list_tasks() == []
    assert await queue.schedules.list() == []


async def test_one_wrong_call_of_many_stores_none(queue):
    with pytest.raises(InvalidTask, match="too many positional"):
        await queue.enqueue_many(sample_tasks.add, [(1, 2), (1, 2, 3)])

    assert await queue.list_tasks() == []


async def test_a_parameter_with_the_name_of_an_option_is_not_an_option(queue):
    handle = await queue.enqueue(sample_tasks.anything, delay=5)

    task = await queue.get_task(handle.id)
    assert task.kwargs == {"delay": 5}
    assert task.eta - task.created_at < timedelta(seconds=1)


def test_the_check_agrees_with_python_for_every_shape_of_a_function():
    functions: list[Callable[..., int]] = [
        lambda: 0,
        lambda a, b=2: 0,
        lambda a, *, c, d=1: 0,
        lambda a, /, b, **k: 0,
        lambda a, *rest: 0,
        lambda *rest, **k: 0,
        lambda a=1, /, b=2, *, c=3: 0,
    ]
    names = [each for size in range(4) for each in itertools.combinations("abcdx", size)]
    for func, count, given in itertools.product(functions, range(4), names):
        args, kwargs = (0,) * count, dict.fromkeys(given, 0)
        try:
            func(*args, **kwargs)
        except TypeError:
            fits = False
        else:
            fits = True
        assert FunctionTypes(func, "f").accepts(args, kwargs) == fits


async def test_a_decorator_that_passes_arguments_itself_decides_what_fits(queue):
    handle = await queue.enqueue(sample_tasks.injected, 5)
    await queue.worker().run_until_empty()

    assert await handle.result(timeout=30) == "session 5"


async def test_a_function_that_was_called_instead_of_passed_is_named(queue):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidTask, match=r"fetch was called: .* enqueue\(fetch, …\)"):
            await queue.enqueue(sample_tasks.fetch("x", depth=1))
    for value in (sample_tasks.add(1), None, {"a": 1}, [1]):
        with pytest.raises(InvalidTask, match=r"not a function but .*; was the function called\?"):
            await queue.enqueue(value)


WRONG_VALUES: list[tuple[Any, Any, str]] = [
    (sample_tasks.ship, 5, r"ship: order: expected Order, got int"),
    (sample_tasks.ship, None, "order: expected Order, got NoneType"),
    (sample_tasks.ship, {}, "order: Order needs 'number'"),
    (sample_tasks.ship, {"number": "1"}, r"order\.number: expected int, got str"),
    (
        sample_tasks.ship,
        {"number": 1, "color": "pink"},
        r"order\.color: Color: expected 'red' . 'blue'",
    ),
    (sample_tasks.ship, {"number": -1}, "order: Order: ValueError: a number is positive"),
    (sample_tasks.ship, Invoice, "order: expected Order, got type"),
    (sample_tasks.ship, Invoice(1), "a Invoice would be read as Order.*annotate it as Invoice"),
    (sample_tasks.several, User("a", None), r"args\[0\]: expected Order, got User"),  # type: ignore[arg-type]
    (
        sample_tasks.add,
        Order(1),
        r"args\[0\]: a value of type .*Order cannot be encoded; name its class",
    ),
    (sample_tasks.without_annotations, Order(1), "name its class in the annotation"),
]


@pytest.mark.parametrize(("func", "value", "message"), WRONG_VALUES)
async def test_a_value_that_the_worker_could_not_use_is_refused(queue, func, value, message):
    args = (value, 1) if func is sample_tasks.without_annotations else (value,)

    with pytest.raises(SerializationError, match=message):
        await queue.enqueue(func, *args)
    assert await queue.list_tasks() == []


async def test_an_object_that_contains_itself_is_refused(queue):
    node = Node(1)
    node.children.append(node)

    with pytest.raises(SerializationError, match="nested too deeply"):
        await queue.enqueue(ECHOES["recursive_dataclass"], node)


async def test_keys_are_made_of_the_arguments_as_they_were_passed(queue):
    handle = await queue.enqueue(sample_tasks.keyed, Order(7, Color.BLUE))

    task = await queue.get_task(handle.id)
    assert (task.unique, task.limits[0].key) == ("order-7", "BLUE")


async def test_equal_objects_have_the_same_unique_key(queue):
    first = await queue.enqueue(sample_tasks.unique, Order(7))
    second = await queue.enqueue(sample_tasks.unique, Order(7))
    third = await queue.enqueue(sample_tasks.unique, Order(8))

    assert first.id == second.id != third.id


async def test_a_schedule_stores_plain_data_too(queue):
    await queue.schedules.add("s", sample_tasks.ship, args=(Order(1),), interval=60)
    handle = await queue.schedules.trigger("s")
    await queue.worker().run_until_empty()

    assert sample_tasks.RUNS.pop() == Order(1)
    assert await handle.result(timeout=30) == {"number": 2, "color": "red"}


async def test_a_secret_of_pydantic_is_hidden_like_one_that_is_marked(queue):
    handle = await queue.enqueue(ECHOES["secret"], pydantic.SecretStr("pw"))

    task = await queue.get_task(handle.id)
    assert task.args == ("pw",)
    assert task.as_dict()["args"] == ["[redacted]"]
