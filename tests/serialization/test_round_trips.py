"""Values of every kind arrive as they were passed, on every store, in arguments and in results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omniq import AsyncTaskQueue, Settings, TaskQueue
from omniq.models import Task
from omniq.serialization import MsgspecSerializer
from omniq.tasks.annotations import converter_of
from tests.serialization import kinds
from tests.serialization.kinds import ECHOES, KINDS, RECEIVED

STORES = ["memory", "sqlite", "file", "postgres", "redis"]
one_of_each = st.fixed_dictionaries({kind: strategy for kind, (_, strategy) in KINDS.items()})


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/store.db"
        case "file":
            return f"file://{tmp_path}/store"
        case server:
            url: str = request.getfixturevalue(f"{server}_url")
            return url


def same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def test_there_are_at_least_forty_kinds():
    assert len(KINDS) >= 40


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=15)
def test_a_value_becomes_plain_data_and_is_made_again(kind, data):
    annotation, strategy = KINDS[kind]
    value = data.draw(strategy)
    converter, serializer = converter_of(annotation), MsgspecSerializer()

    plain = converter.dump(value, "value")
    task = serializer.decode_task(serializer.encode_task(Task(func_path="m.f", args=(plain,))))

    assert same(converter.load(task.args[0], "value"), value)


@pytest.mark.timeout(240)
@given(values=one_of_each)
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
async def test_every_kind_is_passed_and_returned_on_every_store(store_url, values):
    async with AsyncTaskQueue(store_url, settings=Settings(durability="os")) as queue:
        handles = {
            kind: await queue.enqueue(ECHOES[kind], value, named=value)
            for kind, value in values.items()
        }
        await queue.worker(concurrency=20).run_until_empty()
        results = {kind: await handle.result(timeout=10) for kind, handle in handles.items()}

    for kind, value in values.items():
        assert same(RECEIVED[kind][0], value), kind
        assert same(RECEIVED[kind][1], value), kind
        assert same(results[kind], value), kind


@given(values=one_of_each)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_calls_and_other_handles_have_types_as_well(values):
    with TaskQueue("memory://") as queue:
        calls = [(ECHOES[kind], (value,)) for kind, value in values.items()]
        many = queue.enqueue_many(calls)
        queue.worker(concurrency=20).run_until_empty()
        for handle, (kind, value) in zip(many, values.items(), strict=True):
            assert same(handle.result(timeout=10), value), kind
            assert same(queue.handle(handle.id, ECHOES[kind]).result(timeout=10), value), kind


@given(value=kinds.users)
@settings(max_examples=10, deadline=None)
def test_with_cloudpickle_the_object_itself_is_passed(value):
    chosen = Settings(serializer="cloudpickle", signing_key="k" * 32)
    with TaskQueue("memory://", settings=chosen) as queue:
        handle = queue.enqueue(ECHOES["nested_dataclass"], value)
        stored = queue.get_task(handle.id)
        queue.worker().run_until_empty()

        assert stored is not None
        assert stored.args == (value,)
        assert handle.result(timeout=10) == value


def test_with_cloudpickle_an_object_of_another_class_is_passed_as_well():
    chosen = Settings(serializer="cloudpickle", signing_key="k" * 32)
    with TaskQueue("memory://", settings=chosen) as queue:
        handle = queue.enqueue(ECHOES["nested_dataclass"], kinds.Address("here"))
        queue.worker().run_until_empty()

        assert handle.result(timeout=10) == kinds.Address("here")
