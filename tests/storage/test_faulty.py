"""A faulty storage fulfils the contract until a fault is set, and then fails as it was set."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from omniq.errors import StorageError
from omniq.models import TaskStatus
from omniq.outcomes import Succeeded
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_result, a_task, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract import StorageContract, opener
from omniq.testing.faults import _VERBS, FaultyStorage


@pytest.mark.deep
class TestFaultyWithoutFaults(StorageContract):
    @pytest.fixture
    async def open_another(self, clock):
        store = MemoryStorage(clock=clock)

        def make(**options):
            return FaultyStorage(store.another(**options))

        async with opener(make) as open_another:
            yield open_another


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def faulty(clock):
    async with FaultyStorage(MemoryStorage(clock=clock)) as storage:
        yield storage


def test_every_verb_of_the_engine_can_fail():
    verbs = inspect.getmembers(MemoryStorage()._engine, inspect.iscoroutinefunction)

    assert {name for name, _ in verbs if not name.startswith("_")} == {*_VERBS, "record_and_claim"}


async def test_a_call_that_fails_before_has_changed_nothing(faulty):
    faulty.fail("enqueue")
    with pytest.raises(StorageError, match="enqueue: failed on purpose, before it was done"):
        await faulty.enqueue(a_task("a"))

    assert await faulty.list_tasks() == []
    assert await faulty.enqueue(a_task("a")) == "a"


async def test_an_enqueue_whose_reply_was_lost_can_be_repeated_with_its_nonce(faulty):
    faulty.fail("enqueue", when="after")
    with pytest.raises(StorageError, match="after it was done"):
        await faulty.enqueue_many(some_tasks("ab"), nonce="call-1")

    assert await faulty.enqueue_many(some_tasks("ab"), nonce="call-1") == ["a", "b"]
    assert len(await faulty.list_tasks()) == 2


async def test_an_outcome_whose_reply_was_lost_can_be_repeated(faulty):
    await faulty.enqueue(a_task("a"))
    (task,) = await faulty.reserve(1)
    outcome = Succeeded("a", task.token, a_result(task, 42))
    faulty.fail("record", when="after")
    with pytest.raises(StorageError):
        await faulty.record([outcome])

    assert await faulty.record([outcome]) == [True]
    assert (await faulty.get_task("a")).status is TaskStatus.SUCCESS


async def test_a_claim_whose_reply_was_lost_shows_at_the_next_renewal(faulty):
    await faulty.enqueue(a_task("a"))
    faulty.fail("reserve", when="after")
    with pytest.raises(StorageError):
        await faulty.reserve(1)

    assert (await faulty.renew()).held == {"a": 1}


async def test_a_renewal_whose_reply_was_lost_can_be_repeated(faulty):
    faulty.fail("renew", when="after")
    with pytest.raises(StorageError):
        await faulty.renew()

    assert faulty.lease_remaining <= 0
    await faulty.renew()
    assert [worker.id for worker in await faulty.workers()] == [faulty.owner]


async def test_the_nth_call_and_the_given_number_of_calls_after_it_fail(faulty):
    faulty.fail("enqueue", at=2, times=2)
    replies: list[object] = []
    for task in some_tasks("abcd"):
        replies += await asyncio.gather(faulty.enqueue(task), return_exceptions=True)

    assert [isinstance(reply, StorageError) for reply in replies] == [False, True, True, False]
    assert faulty.calls["enqueue"] == 4


async def test_a_fault_without_a_limit_lasts_until_heal_is_called(faulty):
    faulty.fail("read", times=None, error=StorageError("the disk is gone"))
    for _ in range(3):
        with pytest.raises(StorageError, match="the disk is gone"):
            await faulty.stats()
    faulty.heal()

    assert (await faulty.stats()).dead == 0


async def test_recording_and_claiming_in_one_step_fails_by_either_name(faulty):
    await faulty.enqueue_many(some_tasks("ab"))
    (task,) = await faulty.reserve(1)
    outcome = Succeeded("a", task.token, a_result(task))
    for verb in ("record", "reserve"):
        faulty.fail(verb)
        with pytest.raises(StorageError, match="record/reserve"):
            await faulty.record_and_reserve([outcome], 1)

    recorded, claimed = await faulty.record_and_reserve([outcome], 1)
    assert (recorded, [task.id for task in claimed]) == ([True], ["b"])


async def test_a_delay_passes_on_the_clock(faulty, clock):
    faulty.delay("enqueue", seconds=5)
    slow = asyncio.create_task(faulty.enqueue(a_task("a")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not slow.done()
    clock.advance(5)

    assert await slow == "a"


async def test_a_sibling_shares_the_faults_and_the_owner(faulty):
    faulty.fail("renew", at=2)
    async with faulty.sibling() as sibling:
        await sibling.renew()
        with pytest.raises(StorageError):
            await faulty.renew()
        await sibling.renew()

    assert faulty.calls["renew"] == 3
    assert sibling.owner == faulty.owner


async def test_closing_leaves_nothing_open_even_when_it_fails(clock):
    inner = MemoryStorage(clock=clock)
    faulty = FaultyStorage(inner)
    await faulty.open()
    faulty.fail("close", when="after")
    with pytest.raises(StorageError):
        await faulty.close()

    assert not inner.is_open
    assert not faulty.is_open
