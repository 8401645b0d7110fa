"""The limits that the function `record_outcomes_and_claim` applies are those of the rules, in random games."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from omniq.gate_rules import FOREVER
from omniq.models import Limit
from omniq.outcomes import Released, Succeeded
from omniq.storage.postgres import encoding, migrations
from omniq.testing.builders import a_result, a_task, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ids
from tests.storage.limit_games import play
from tests.storage.postgres_stores import Schema

ONE = (Limit(key="k", max_running=1),)


def success(task):
    return Succeeded(task.id, task.token, a_result(task))


@pytest.fixture(scope="module")
def _schemas(postgres_server_url):
    schemas = {name: Schema(postgres_server_url) for name in ("fast", "rules", "single")}
    yield schemas
    for schema in schemas.values():
        schema.drop()


@pytest.fixture
def schemas(_schemas):
    """Empty stores: two for a game, by their names in it, and one for other tests."""
    for schema in _schemas.values():
        schema.wipe()
    return _schemas


def new_storage(schemas, name, clock):
    return schemas[name].new_storage(clock=clock)


@pytest.mark.parametrize("seed", range(5))
async def test_the_function_applies_limits_as_the_rules_do(schemas, seed):
    await play(seed, partial(new_storage, schemas))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5, 105))
async def test_the_function_applies_limits_as_the_rules_do_in_many_games(schemas, seed):
    await play(seed, partial(new_storage, schemas))


@pytest.fixture
async def storage(schemas):
    async with schemas["single"].new_storage(clock=ManualClock()) as opened:
        yield opened


def execute(schemas, sql):
    schemas["single"].execute(sql.format(schema=schemas["single"].name))


def set_state(schemas, state):
    data = state if isinstance(state, bytes) else msgspec.msgpack.encode(state)
    execute(
        schemas, f"UPDATE {{schema}}.documents SET data = '\\x{data.hex()}' WHERE kind = 'gate'"
    )


def refuse_rules(storage, monkeypatch):
    """Have the storage fail if it would record or claim by the rules."""
    monkeypatch.delattr(storage._engine.__class__, "_by_rules")


async def test_claims_through_a_running_limit_need_no_rules(storage, monkeypatch):
    refuse_rules(storage, monkeypatch)
    limits = (Limit(key="k", max_running=3),)
    await storage.enqueue_many(some_tasks("abcdef", limits=limits))

    first = await storage.reserve(5)
    outcomes = [success(task) for task in first[:2]]
    recorded, second = await storage.record_and_reserve(outcomes, 5)

    assert (ids(first), recorded, ids(second)) == (["a", "b", "c"], [True, True], ["d", "e"])
    assert [key for key, _ in (await storage.gates())["running:k"].holders] == ["c", "d", "e"]


async def test_a_state_that_an_older_omniq_has_written_is_read(storage, schemas, monkeypatch):
    await storage.enqueue_many(some_tasks("abc", limits=ONE))
    (a,) = await storage.reserve(2)
    holders = [["a", a.token]]
    set_state(schemas, {"holders": holders, "wake_at": FOREVER, "has_parked": True, "parks": 300})
    refuse_rules(storage, monkeypatch)

    recorded, claimed = await storage.record_and_reserve([success(a)], 2)

    state = (await storage.gates())["running:k"]
    assert (recorded, ids(claimed)) == ([True], ["b"])
    assert (state.holders, state.parks) == ([("b", claimed[0].token)], 300)


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\x00",
        b"\x81",
        b"\x81\xa7holders",
        b"\x81\xa7holders\x93\x92",
        b"\x81\xa7wake_at\xff",
        b"\x82\xa7holders\x9f\x92\xa1a\xa5parks\x01",
        {"starts": [1]},
        {"parks": -1},
        {"holders": [["x", 1]], "more": 1},
    ],
)
async def test_a_damaged_state_stops_no_task(storage, schemas, state):
    await storage.enqueue_many(some_tasks("ab", limits=ONE))
    (a,) = await storage.reserve(1)
    set_state(schemas, state)

    recorded, claimed = await storage.record_and_reserve([success(a)], 2)

    assert recorded == [True]
    assert ids(claimed + await storage.reserve(2)) == ["b"]


async def test_a_holder_whose_token_has_the_bytes_of_another_holder_stays(storage):
    token = 0x92_A1_78_05
    holders = [msgspec.msgpack.encode(holder) for holder in (("long", token), ("y", 1), ("x", 5))]
    without = "SELECT {schema}.without_holder($1, $2)"

    found = await storage._backend.statements.fetch(without, b"".join(holders), holders[2])
    missing = await storage._backend.statements.fetch(without, b"".join(holders[:2]), holders[2])

    assert holders[2] in holders[0]
    assert [data for (data,) in found + missing] == [b"".join(holders[:2])] * 2


async def test_only_tasks_whose_outcomes_are_recorded_leave_their_limit(storage):
    limits = (Limit(key="k", max_running=3),)
    await storage.enqueue_many(some_tasks("abc", limits=limits))
    a, b, c = await storage.reserve(3)
    await storage.cancel("b")

    recorded, _ = await storage.record_and_reserve(
        [success(a), Released("b", b.token), success(c)], 1
    )

    assert recorded == [True, True, True]
    assert "running:k" not in await storage.gates()


async def test_a_damaged_task_leaves_the_limit_that_the_function_has_counted_it_in(
    storage, schemas
):
    await storage.enqueue_many(some_tasks("ab", limits=ONE))
    execute(schemas, "UPDATE {schema}.live SET rest = '\\xc1' WHERE id = 'a'")

    assert await storage.reserve(2) == []
    assert ids(await storage.reserve(2)) == ["b"]
    assert [letter.task_id for letter in await storage.list_dead()] == ["a"]


async def test_a_damaged_task_of_a_lost_worker_leaves_its_limit(storage, schemas):
    await storage.enqueue_many(some_tasks("ab", limits=ONE))
    await storage.reserve(1)
    execute(schemas, "UPDATE {schema}.live SET rest = '\\xc1' WHERE id = 'a'")
    await storage.retire()

    async with schemas["single"].new_storage(clock=storage.clock) as another:
        claimed = [*await another.reserve(2), *await another.reserve(2)]

        assert ids(claimed) == ["a"]


async def test_a_store_of_version_7_has_its_limits_after_the_upgrade(postgres_server_url):
    schema = Schema(postgres_server_url)
    async with schema.new_storage() as storage:
        await storage.enqueue_many(some_tasks("abc", limits=ONE))
        (a,) = await storage.reserve(2)
        state = {"holders": [["a", a.token]], "wake_at": FOREVER, "has_parked": True, "parks": 1}
        schema.execute(
            f"DELETE FROM {schema.name}.versions WHERE version > 7; "
            f"DROP TYPE {schema.name}.leaving CASCADE; "
            f"UPDATE {schema.name}.live SET gates = gates[1:1]; "
            f"UPDATE {schema.name}.documents SET data = '\\x{msgspec.msgpack.encode(state).hex()}' "
            "WHERE kind = 'gate'"
        )

        assert await schema.new_storage().upgrade_schema() == (7, migrations.NEWEST)
        for writer in (storage._backend.writer, storage._backend.second_writer):
            writer._drop()  # its statements have the type that was dropped
        assert ids(await storage.reserve(2)) == []
        assert await storage.record([success(a)]) == [True]
        await storage.enqueue(a_task("d", limits=ONE))
        (b,) = await storage.reserve(2)
        assert b.id == "b"
        assert ids((await storage.record_and_reserve([success(b)], 2))[1]) == ["c"]
    schema.drop()


async def test_a_worker_of_version_7_is_given_no_task_with_a_limit(storage):
    """It applies all limits by the rules, and does not know the states of a part of a claim."""
    await storage.enqueue(a_task("plain"))
    await storage.reserve(1)
    await storage.enqueue(a_task("limited", limits=ONE))
    wanted = encoding.wanted_tasks(None, None)

    lines = await storage._backend.statements.call_once(
        "record_outcomes_and_claim",
        storage.owner,
        storage.clock.micros(),
        encoding.endings([], []),
        [],
        [],
        [],
        (1, None, wanted, "name", 0, None, None),
        False,
    )

    assert [line["seq"] for line in lines] == [3]
