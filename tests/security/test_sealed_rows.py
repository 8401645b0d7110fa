"""With a key, rows, unique keys and dead letters that were written without it are refused.

The attacker has this very code, and no key: what it plants is as well-formed as everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from omniq import AsyncTaskQueue
from omniq.errors import DuplicateTask, InvalidTask, KeyNeeded, SerializationError
from omniq.models import BreakerRule, DeadLetter, Limit, Schedule, Task, TaskStatus
from omniq.outcomes import Failed, Succeeded
from omniq.settings import Settings
from omniq.storage import open_storage, row_rules
from omniq.storage.backend import ANY, Changes, DocumentChange, Ended, Section
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.row_rules import Finish, Row
from omniq.storage.step import CHECKPOINT, UNIQUE
from omniq.testing.builders import a_result, a_task, an_error
from tests.browser.served import bearer, dashboard_client
from tests.security import secret_tasks
from tests.security.conftest import OpenStore, raw_store_of

KEY, OLD = "the-key-of-this-store", "the-key-of-last-year"
NO_KEY = Settings(durability="os")


@pytest.fixture(params=["signing_key", "encryption_key"])
def settings(request) -> Settings:
    keys: dict[str, Any] = {request.param: KEY}
    return Settings(durability="os", **keys)


def encrypted(key: str = KEY, *old_keys: str) -> Settings:
    return Settings(durability="os", encryption_key=key, old_keys=" ".join(old_keys) or None)


def a_guarded_task(now: Any, task_id: str = "guarded") -> Task:
    """A task that has everything that its row must have too."""
    return a_task(
        task_id,
        priority=1,
        queue="mail",
        unique=f"key of {task_id}",
        expires=now + timedelta(hours=1),
        max_crashes=2,
        limits=(Limit(key="few", max_running=50), Limit(key="slow", rate=500, per=60.0)),
        breakers=(BreakerRule(name="bank", max_failures=500),),
    )


async def replant(open_store: OpenStore, changes: dict[str, dict[str, Any]]) -> None:
    """Store waiting tasks again, with their sealed bodies and other fields of their rows."""
    async with open_store(NO_KEY) as attacker:
        for task_id, fields in changes.items():
            row = await _row(attacker, task_id)
            assert await attacker.cancel(task_id)
            assert await attacker.delete_task(task_id)
            await attacker._engine.enqueue([msgspec.structs.replace(row, **fields)])


async def _row(storage: BaseStorage, task_id: str) -> Row:
    record = await storage._engine.record(task_id)
    assert record is not None
    return record.row


async def _fail(storage: BaseStorage, task_id: str) -> None:
    tasks = {task.id: task for task in await storage.reserve(50)}
    outcome = Failed(task_id, tasks[task_id].token, an_error("it is over"), "for good")
    assert await storage.record([outcome]) == [True]


# Rows


CHANGES: dict[str, Callable[[Row], Any]] = {
    "priority": lambda row: row.priority + 1,
    "queue": lambda row: "default",
    "func_path": lambda row: "tasks.other",
    "unique": lambda row: None,
    "expires": lambda row: None if row.expires is None else row.expires + 1,
    "max_crashes": lambda row: None,
    "gates": lambda row: (),
}


@pytest.mark.security("S62")
@pytest.mark.parametrize("field", CHANGES)
async def test_a_row_that_differs_from_its_sealed_body_does_not_run(open_store, settings, field):
    async with open_store(settings) as storage:
        await storage.enqueue(a_guarded_task(storage.clock.now()))
        row = await _row(storage, "guarded")
    await replant(open_store, {"guarded": {field: CHANGES[field](row)}})

    async with open_store(settings) as storage:
        claimed = await storage.reserve(5)
        letter = await storage.get_dead("guarded")
        task = await storage.get_dead_task("guarded")
    assert claimed == []
    assert letter is not None
    assert task is not None
    assert (letter.failure_reason, letter.is_verified, task.is_verified) == (
        "undecodable", False, False,
    )  # fmt: skip


@pytest.mark.security("S62")
async def test_a_task_that_ages_runs_with_the_rank_of_its_row_and_no_other(open_store, settings):
    async with open_store(settings) as storage:
        for name in ("own", "forged", "higher"):
            await storage.enqueue(a_task(name, ageing=60, priority=2))
    await replant(open_store, {"forged": {"priority": 2}, "higher": {"priority": 9}})

    async with open_store(settings) as storage:
        assert [task.id for task in await storage.reserve(5)] == ["own"]


@pytest.mark.security("S62")
async def test_every_gate_of_a_row_is_compared(open_store, settings):
    """Each gate left out, made larger, renamed, or put before the others."""
    async with open_store(settings) as storage:
        await storage.enqueue(a_guarded_task(storage.clock.now()))
        gates = (await _row(storage, "guarded")).gates
    variations = [gates[::-1], (*gates, gates[0])]
    for number, gate in enumerate(gates):
        before, behind = gates[:number], gates[number + 1 :]
        variations.append(before + behind)
        for field, value in (("size", 999), ("span", gate.span + 1), ("key", f"{gate.key}x")):
            variations.append((*before, msgspec.structs.replace(gate, **{field: value}), *behind))
    variations.append(gates)
    forged = {f"guarded-{number}": {"gates": gates} for number, gates in enumerate(variations)}
    async with open_store(settings) as storage:
        now = storage.clock.now()
        await storage.enqueue_many([a_guarded_task(now, task_id) for task_id in forged])
    await replant(open_store, forged)

    async with open_store(settings) as storage:
        claimed = [task.id for task in await storage.reserve(50)]
        letters = await storage.list_dead()
    assert claimed == ["guarded", "guarded-14"]
    assert len(letters) == 14


@pytest.mark.security("S62")
async def test_fields_that_a_task_does_not_have_cannot_be_given_to_its_row(open_store, settings):
    async with open_store(settings) as storage:
        await storage.enqueue(a_guarded_task(storage.clock.now()))
        guarded = await _row(storage, "guarded")
        names = ("gates", "expires", "max_crashes", "unique")
        await storage.cancel("guarded")
        await storage.enqueue_many([a_task(name) for name in names])
    await replant(open_store, {name: {name: getattr(guarded, name)} for name in names})

    async with open_store(settings) as storage:
        claimed = await storage.reserve(5)
        letters = await storage.list_dead()
    assert claimed == []
    assert {letter.task_id for letter in letters} == set(names)


@pytest.mark.security("S62")
async def test_a_signed_task_does_not_run_before_its_eta(open_store, settings):
    async with open_store(settings) as storage:
        eta = storage.clock.now() + timedelta(hours=1)
        await storage.enqueue(a_task("later", eta=eta))
        row = await _row(storage, "later")
    early = row.due - 3_700_000_000
    await replant(open_store, {"later": {"due": early, "turn": early, "visible": 0}})

    async with open_store(settings) as storage:
        claimed = await storage.reserve(5)
        waiting = await storage.get_task("later")
        in_time = await storage.reserve(5, eta)
    assert claimed == []
    assert waiting is not None
    assert (waiting.status, waiting.eta, waiting.attempts) == (TaskStatus.PENDING, eta, 0)
    assert [task.id for task in in_time] == ["later"]


@pytest.mark.security("S62")
async def test_a_task_runs_again_with_the_limits_that_its_retry_gives_it(open_store, settings):
    async with open_store(settings) as storage:
        task = a_guarded_task(storage.clock.now())
        await storage.enqueue(task)
        await _fail(storage, "guarded")
        assert await storage.retry_dead("guarded")
        await _fail(storage, "guarded")
        fewer = msgspec.structs.replace(
            task, limits=(), breakers=(), priority=4, unique="account-8", max_crashes=None
        )
        assert await storage.retry_dead("guarded", task=fewer)
        row = await _row(storage, "guarded")
        (claimed,) = await storage.reserve(5)

    assert (row.gates, row.priority, row.max_crashes) == ((), 4, None)
    assert (claimed.id, claimed.unique, claimed.limits) == ("guarded", "account-8", ())


# Unique keys


async def _names(storage: BaseStorage) -> list[str]:
    """The names under which unique keys are held."""
    return [document.key for document in await storage._engine._all_documents(UNIQUE)]


@pytest.mark.security("S62")
async def test_unique_keys_are_unreadable_in_an_encrypted_store(store_url):
    chosen = encrypted(KEY, OLD)
    async with AsyncTaskQueue(store_url, settings=chosen) as queue:
        named = await queue.options(unique="canary-7").enqueue(
            "tests.security.secret_tasks.echo", 1
        )
        hashed = await queue.options(unique=True).enqueue("tests.security.secret_tasks.echo", 1234)
        again = await queue.options(unique=True).enqueue("tests.security.secret_tasks.echo", 1234)
        shown = [await queue.get_task(handle.id) for handle in (named, hashed)]
        names = await _names(queue.storage)
    raw = raw_store_of(store_url)
    everything = repr(raw.addresses()).encode()
    everything += b"".join(raw.read(address) for address in raw.addresses())
    raw.close()

    keys = [task.unique or "" for task in shown if task is not None]
    # Anyone could try all arguments and compare the hashes, if they were made without a key.
    assert keys[0] == "canary-7"
    assert keys[1].startswith("tests.security.secret_tasks.echo:")
    assert again.id == hashed.id
    assert len(names) == 4
    for key in keys:
        assert key.rpartition(":")[2].encode() not in everything
    for name in names:
        assert name.encode() in everything


@pytest.mark.security("S62")
async def test_a_unique_key_is_held_under_the_old_key_too(open_store):
    before, between, after = encrypted(OLD), encrypted(OLD, KEY), encrypted(KEY, OLD)
    for first, second in ((before, between), (between, after), (before, after), (after, between)):
        async with open_store(first) as storage:
            await storage.enqueue(a_task("one", unique="same"))
        async with open_store(second) as storage:
            assert await storage.enqueue(a_task("two", unique="same")) == "one"
            await _end_all(storage)
            assert await storage.enqueue(a_task("two", unique="same")) == "two"
            await _end_all(storage)
            assert await _names(storage) == []


async def _end_all(storage: BaseStorage) -> None:
    tasks = await storage.reserve(50)
    outcomes = [Succeeded(task.id, task.token, a_result(task)) for task in tasks]
    assert all(await storage.record(outcomes))
    for task in tasks:
        await storage.delete_task(task.id)


@pytest.mark.security("S62")
@pytest.mark.timeout(60)
async def test_a_unique_key_is_held_once_while_keys_are_replaced(open_store):
    """Producers with the keys in either order, at the same time."""
    async with open_store(encrypted(OLD, KEY)) as one, open_store(encrypted(KEY, OLD)) as other:
        for number in range(10):
            calls = [
                storage.enqueue(a_task(f"{number}-{name}", unique=f"key-{number}"))
                for name, storage in (("a", one), ("b", other), ("c", one), ("d", other))
            ]
            assert len(set(await asyncio.gather(*calls))) == 1
        tasks = await one.reserve(50)

        assert sorted(task.unique or "" for task in tasks) == [f"key-{n}" for n in range(10)]


@pytest.mark.security("S62")
async def test_a_large_batch_holds_each_unique_key_once(open_store):
    async with open_store(encrypted(KEY, OLD)) as storage:
        await storage.enqueue(a_task("first", unique="key-0"))
        tasks = [a_task(f"many-{n}", unique=f"key-{n % 300}") for n in range(600)]
        ids = await storage.enqueue_many(tasks)

        assert ids[:2] == ["first", "many-1"]
        assert ids[:300] == ids[300:]
        assert await storage.count_waiting() == 300
        assert len(await _names(storage)) == 600


@pytest.mark.security("S62")
async def test_a_key_in_clear_text_of_an_earlier_version_is_still_held(open_store):
    chosen = encrypted()
    async with open_store(chosen) as storage:
        await storage.enqueue(a_task("older", unique="account-7"))
    await replant(open_store, {"older": {"unique": "account-7", "unique_aliases": ()}})

    async with open_store(chosen) as storage:
        assert await _names(storage) == ["account-7"]
        assert await storage.enqueue(a_task("newer", unique="account-7")) == "older"
        template = a_task("tick", unique="account-7")
        await storage.put_schedule(Schedule(id="often", task=template, interval=60.0))
        (schedule,) = await storage.list_schedules()
        assert await storage.fire_schedule(schedule, schedule, template)
        assert await storage.get_task("tick") is None
        await _fail(storage, "older")
        assert await _names(storage) == []
        # Retried, it holds the key as new tasks do.
        assert await storage.retry_dead("older")
        assert "account-7" not in await _names(storage)
        assert await storage.enqueue(a_task("newer", unique="account-7")) == "older"


@pytest.mark.security("S62")
async def test_an_encrypted_store_knows_the_unique_keys_of_a_signed_one(open_store):
    signed = Settings(durability="os", signing_key=KEY)
    both = Settings(durability="os", signing_key=KEY, encryption_key=OLD)
    back = Settings(durability="os", signing_key=KEY, old_keys=OLD)
    for first, second in ((signed, both), (both, back)):
        async with open_store(first) as storage:
            await storage.enqueue(a_task("one", unique="same"))
        async with open_store(second) as storage:
            assert await storage.enqueue(a_task("two", unique="same")) == "one"
            await _end_all(storage)
            assert await _names(storage) == []


@pytest.mark.security("S62")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "chosen",
    [
        encrypted(KEY, KEY),
        encrypted(KEY, OLD, OLD),
        Settings(durability="os", signing_key=KEY, old_keys=f"{OLD} {KEY} {OLD}"),
    ],
    ids=["the newest key again", "an old key twice", "signed"],
)
async def test_a_key_that_is_given_twice_is_one_key(open_store, chosen):
    async with open_store(chosen) as storage:
        assert await storage.enqueue(a_task("one", unique="same")) == "one"
        assert await storage.enqueue(a_task("two", unique="same")) == "one"
        await _end_all(storage)
        assert await _names(storage) == []


@pytest.mark.security("S62")
async def test_the_key_of_an_encrypted_store_may_become_its_signing_key(open_store):
    async with open_store(encrypted(KEY)) as storage:
        await storage.enqueue(a_task("one", unique="same"))
    async with open_store(Settings(durability="os", signing_key=KEY)) as storage:
        assert [task.id for task in await storage.reserve(5)] == ["one"]


@pytest.mark.security("S62")
async def test_a_dead_letter_of_an_encrypted_store_does_not_take_its_key_from_a_signed_task(
    open_store,
):
    async with open_store(encrypted(OLD)) as storage:
        await storage.enqueue(a_task("one", unique="same"))
        await _fail(storage, "one")
    async with open_store(Settings(durability="os", signing_key=KEY, old_keys=OLD)) as storage:
        assert await storage.enqueue(a_task("two", unique="same")) == "two"
        with pytest.raises(DuplicateTask, match="two"):
            await storage.retry_dead("one")
        await _end_all(storage)
        assert await storage.retry_dead("one")
        assert await storage.enqueue(a_task("two", unique="same")) == "one"
        await _end_all(storage)
        assert await _names(storage) == []


@pytest.mark.security("S62")
async def test_an_enqueue_does_not_return_a_task_that_was_planted_as_the_holder(
    open_store, settings
):
    """Its caller would take the result of that task, which is genuine, for the one of this call."""
    async with open_store(settings) as storage:
        await storage.enqueue(a_task("mine", unique="pay-7"))
        (name,) = await _names(storage)
        await _end_all(storage)
        await storage.enqueue_many([a_task("paid", unique="pay-1"), a_task("plain")])
    async with open_store(NO_KEY) as attacker:
        await attacker.enqueue(a_task("planted", unique="pay-7"))
    for holder in ("paid", "plain", "planted"):
        async with open_store(NO_KEY) as attacker:
            change = DocumentChange(UNIQUE, name, ANY, holder.encode())
            await attacker._engine._write(Changes(documents=[change]))
        async with open_store(settings) as storage:
            assert await storage.enqueue(a_task(f"for-{holder}", unique="pay-7")) == f"for-{holder}"
            assert await storage.cancel(f"for-{holder}")


# Dead letters


@pytest.mark.security("S62")
async def test_a_dead_letter_is_verified_by_those_who_have_the_key(open_store, settings):
    async with open_store(settings) as storage:
        await storage.enqueue(a_task("a"))
        await _fail(storage, "a")
        letter = await storage.get_dead("a")
        (listed,) = await storage.list_dead()
    async with open_store(NO_KEY) as stranger:
        (seen,) = await stranger.list_dead()

    assert letter == listed
    assert letter is not None
    assert letter.is_verified
    assert "it is over" in letter.error_details
    assert not seen.is_verified
    assert ("it is over" in seen.error_details) == (settings.signing_key is not None)


@pytest.mark.security("S62")
@pytest.mark.parametrize("fact", ["for good", "tasks.work"])
async def test_a_dead_letter_that_was_changed_is_not_verified(store_url, settings, fact):
    async with open_storage(store_url, settings=settings) as storage:
        await storage.enqueue(a_task("a"))
        await _fail(storage, "a")
        func_path = (await _row(storage, "a")).func_path
    raw = raw_store_of(store_url)
    old = fact.encode() if fact == "for good" else func_path.encode()
    new = old[:-1] + b"!"
    for address in raw.addresses():
        data = raw.read(address)
        if old in data:
            raw.write(address, data.replace(old, new))
    raw.close()

    async with open_storage(store_url, settings=settings) as storage:
        letters = await storage.list_dead()
        letter = await storage.get_dead("a")
    assert [each.is_verified for each in letters] == [False]
    assert letter is None or not letter.is_verified


@pytest.mark.security("S62")
async def test_the_dead_letter_of_another_task_is_not_verified(open_store, settings):
    """Copied as a whole, with its seal."""
    async with open_store(settings) as storage:
        await storage.enqueue(a_task("a"))
        await _fail(storage, "a")
        record = await storage._engine.record("a")
        await storage.enqueue(a_task("b"))
    assert record is not None

    async def end(section: Section) -> None:
        waiting = await section.record("b")
        assert waiting is not None
        row = msgspec.structs.replace(waiting.row, status=TaskStatus.FAILED)
        finished = row_rules.finished_row(
            row, Finish(row.status, a_result(a_task("b"))), b"", section.now
        )
        await section.write(Changes(ended=[Ended(finished, record.letter)]))

    async with open_store(NO_KEY) as attacker:
        await attacker._engine._transact(end)
    async with open_store(settings) as storage:
        letters = [await storage.get_dead(task_id) for task_id in ("a", "b")]
        with pytest.raises(SerializationError, match="not verified"):
            await storage.retry_dead("b", task=a_task("b", args=(1,)))

    assert [letter and letter.is_verified for letter in letters] == [True, False]


@pytest.mark.security("S62")
async def test_a_dead_letter_of_a_forged_task_gets_no_seal(open_store, settings):
    """Also if its worker was lost, which those with the key notice."""
    async with open_store(NO_KEY) as attacker:
        await attacker.enqueue_many([a_task("crashed"), a_task("waits")])
        await attacker.renew(lease=0.05)
        assert len(await attacker.reserve(1)) == 1
        async with open_store(settings) as storage:
            while not await storage.give_back_abandoned(max_crashes=1):
                await storage.clock.sleep(0.02)
            await storage.reserve(5)
            letters = {letter.task_id: letter for letter in await storage.list_dead()}
            for letter in letters.values():
                with pytest.raises(SerializationError, match="not verified"):
                    await storage.retry_dead(letter.task_id, task=a_task(letter.task_id, args=(1,)))

    assert {name: letter.failure_reason for name, letter in letters.items()} == {
        "crashed": "crashed",
        "waits": "undecodable",
    }
    assert not any(letter.is_verified for letter in letters.values())


@pytest.mark.security("S62")
async def test_a_dead_letter_without_a_seal_is_not_retried_with_other_arguments(
    open_store, settings
):
    """Its call is genuine. As it is, it may be retried: nothing is sealed then."""
    async with open_store(settings) as storage:
        await storage.enqueue(a_task("a"))
        await _fail(storage, "a")
        row = await _row(storage, "a")
        await storage.delete_dead("a")
        await storage.delete_task("a")
    await _plant_dead(open_store, row)
    async with open_store(settings) as storage:
        letter, task = await storage.get_dead("a"), await storage.get_dead_task("a")
        with pytest.raises(InvalidTask, match="not verified"):
            await storage.retry_dead("a", task=a_task("a", args=(1,)))
        assert await storage.retry_dead("a")
        claimed = await storage.reserve(1)

    assert isinstance(letter, DeadLetter)
    assert isinstance(task, Task)
    assert (letter.is_verified, task.is_verified) == (False, True)
    assert [each.id for each in claimed] == ["a"]


async def _plant_dead(open_store: OpenStore, row: Row) -> None:
    """Have the row fail without the key, so that its dead letter has no seal."""
    async with open_store(NO_KEY) as attacker:
        waiting = msgspec.structs.replace(row, status=TaskStatus.PENDING, token=0, settled=0)
        await attacker._engine.enqueue([waiting])
        await attacker.reserve(1)


@pytest.mark.security("S62")
@pytest.mark.timeout(60)
async def test_a_forged_dead_letter_is_not_passed_to_a_hook(settings):
    """The worker that notices a lost one calls `on_dead`, and has only read the task."""
    secret_tasks.died.clear()
    chosen = replace(settings, lease=1.0)
    memory = MemoryStorage(settings=chosen)
    async with AsyncExitStack() as stack:
        for name, used in (("forged", NO_KEY), ("genuine", chosen)):
            lost = await stack.enter_async_context(memory.another(settings=used))
            func_path = "tests.security.secret_tasks.noted"
            await lost.enqueue(a_task(name, func_path=func_path, max_crashes=1))
            await lost.renew(lease=0.05)
            assert [task.id for task in await lost.reserve(1)] == [name]
        queue = await stack.enter_async_context(AsyncTaskQueue(memory))
        async with queue.worker(poll_interval=0.05):
            while len(await queue.dead.list()) < 2:
                await queue.storage.clock.sleep(0.05)
        letters = await queue.dead.list()

    assert {letter.task_id: letter.is_verified for letter in letters} == {
        "forged": False,
        "genuine": True,
    }
    assert secret_tasks.died == ["genuine"]


@pytest.mark.security("S62")
async def test_a_dead_letter_with_a_damaged_checkpoint_is_shown_without_it(open_store, settings):
    """Otherwise one of them would keep the worker that found it from reporting all others."""
    async with open_store(settings) as storage:
        await storage.enqueue(a_task("a"))
        await _fail(storage, "a")
        change = DocumentChange(CHECKPOINT, "a", ANY, b"damaged")
        await storage._engine._write(Changes(documents=[change]))
        letter = await storage.get_dead("a")

    assert letter is not None
    assert (letter.checkpoint, letter.is_verified) == (None, True)


# Changes without the key


@pytest.mark.security("S62")
async def test_a_call_that_cannot_be_read_keeps_its_limits_when_it_is_replaced(open_store):
    async with open_store(NO_KEY) as storage:
        await storage.enqueue(a_guarded_task(storage.clock.now()))
    await replant(open_store, {"guarded": {"body": b"damaged"}})

    async with open_store(NO_KEY) as storage:
        assert await storage.reserve(5) == []
        before = await _row(storage, "guarded")
        assert await AsyncTaskQueue(storage).dead.retry("guarded", args=[7])
        row = await _row(storage, "guarded")
        (task,) = await storage.reserve(5)

    for field in CHANGES:
        assert getattr(row, field) == getattr(before, field)
    assert len(row.gates) == 3
    assert task.args == (7,)


@pytest.mark.security("S62")
async def test_a_sealed_call_is_changed_only_with_the_key(open_store, settings):
    async with open_store(settings) as storage:
        await storage.enqueue(a_task("a", args=("sealed",)))
        await _fail(storage, "a")
        template = a_task("often", args=("sealed",))
        await storage.put_schedule(Schedule(id="often", task=template, interval=60.0))
    async with open_store(NO_KEY) as stranger:
        changed = Schedule(id="often", task=a_task("often"), interval=1.0)
        queue = AsyncTaskQueue(stranger)
        refusals: list[Callable[[], Awaitable[Any]]] = [
            lambda: stranger.retry_dead("a", task=a_task("a", args=("other",))),
            lambda: queue.dead.retry("a", args=["other"]),
            lambda: stranger.put_schedule(changed),
            lambda: stranger.get_schedule("often"),
            lambda: queue.schedules.pause("often"),
            lambda: queue.schedules.trigger("often"),
        ]
        for refused in refusals:
            with pytest.raises(KeyNeeded, match="only be read and changed with the key; set OMNIQ"):
                await refused()
    async with open_store(settings) as storage:
        schedule = await storage.get_schedule("often")
        assert await storage.retry_dead("a")
        (task,) = await storage.reserve(1)

    assert schedule is not None
    assert (schedule.interval, task.args) == (60.0, ("sealed",))


# What is shown


@pytest.mark.security("S62")
async def test_the_dashboard_says_what_is_not_verified(settings):
    async with AsyncTaskQueue("memory://", settings=settings) as queue:
        storage: Any = queue.storage
        async with storage.another(settings=NO_KEY) as attacker:
            await attacker.enqueue(a_task("forged"))
            await _fail(attacker, "forged")
        async with dashboard_client(queue) as client:
            listed = (await client.get("/dead", headers=bearer())).text
            page = (await client.get("/tasks/forged", headers=bearer())).text

    assert "not verified: " in listed
    assert "<dt>Dead letter</dt><dd>not verified: " in page
    assert "Retry with these arguments" not in page
