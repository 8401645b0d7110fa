"""Enqueue: which tasks are stored, which are refused, and that a refusal writes nothing."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from omniq.errors import DuplicateTask, InvalidTask, QueueFull, SerializationError
from omniq.models import BreakerRule, Limit, TaskStatus
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    FINAL_KINDS,
    RELEASING_KINDS,
    OutcomeKind,
    a_task,
    an_outcome,
    some_tasks,
)
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
)

_NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001 - the tests need a naive datetime that is refused
_BAD_ID = "use 1 to 128 of the characters A-Z a-z 0-9 . _ - and do not begin with a dot"
_NOT_FINITE = "must be a finite number of seconds"

BAD_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "id empty": ({"id": ""}, f"task id '': {_BAD_ID}"),
    "id dot": ({"id": "."}, f"task id '.': {_BAD_ID}"),
    "id dots": ({"id": ".."}, f"task id '..': {_BAD_ID}"),
    "id hidden": ({"id": ".hidden"}, f"task id '.hidden': {_BAD_ID}"),
    "id slash": ({"id": "a/b"}, f"task id 'a/b': {_BAD_ID}"),
    "id backslash": ({"id": "a\\b"}, _BAD_ID),
    "id space": ({"id": "a b"}, f"task id 'a b': {_BAD_ID}"),
    "id letter outside ASCII": ({"id": "ä"}, f"task id 'ä': {_BAD_ID}"),
    "id newline": ({"id": "a\n"}, _BAD_ID),
    "id NUL": ({"id": "a\0b"}, _BAD_ID),
    "id too long": ({"id": "a" * 129}, _BAD_ID),
    "id huge": ({"id": "a" * 1_000_000}, _BAD_ID),
    "id None": ({"id": None}, _BAD_ID),
    "id number": ({"id": 7}, f"task id 7: {_BAD_ID}"),
    "func_path without a dot": ({"func_path": "work"}, "func_path 'work': expected a dotted path"),
    "func_path empty": ({"func_path": ""}, "func_path '': expected a dotted path"),
    "func_path double dot": ({"func_path": "a..b"}, "func_path 'a..b': expected a dotted path"),
    "func_path digit": ({"func_path": "a.1b"}, "func_path 'a.1b': expected a dotted path"),
    "func_path None": ({"func_path": None}, "func_path NoneType: expected a dotted path"),
    "queue empty": ({"queue": ""}, f"queue '': {_BAD_ID}"),
    "queue path": ({"queue": "../etc"}, f"queue '../etc': {_BAD_ID}"),
    "queue None": ({"queue": None}, f"queue NoneType: {_BAD_ID}"),
    "priority text": ({"priority": "high"}, "priority 'high': expected a whole number"),
    "priority fraction": ({"priority": 1.5}, "priority 1.5: expected a whole number"),
    "priority too large": ({"priority": 2**63}, "below 2**63"),
    "max_retries negative": ({"max_retries": -1}, "max_retries -1: must be at least 0"),
    "max_retries fraction": ({"max_retries": 0.5}, "max_retries 0.5: expected a whole number"),
    "max_retries bool": ({"max_retries": True}, "max_retries True: expected a whole number"),
    "attempts negative": ({"attempts": -1}, "attempts -1: must be at least 0"),
    "eta naive": ({"eta": _NAIVE}, "eta 2026-01-01T00:00:00: has no time zone"),
    "eta number": ({"eta": 5}, "eta 5: expected a datetime"),
    "eta beyond the last date": (
        {"eta": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
        "out of range",
    ),
    "expires naive": ({"expires": _NAIVE}, "expires 2026-01-01T00:00:00: has no time zone"),
    "created_at naive": ({"created_at": _NAIVE}, "created_at 2026-01-01T00:00:00: has no time"),
    "created_at None": ({"created_at": None}, "created_at: expected a datetime"),
    "interval 0": ({"interval": 0}, f"interval 0: {_NOT_FINITE}, above 0"),
    "interval negative": ({"interval": -1.0}, f"interval -1.0: {_NOT_FINITE}, above 0"),
    "interval NaN": ({"interval": math.nan}, f"interval nan: {_NOT_FINITE}"),
    "interval infinite": ({"interval": math.inf}, f"interval inf: {_NOT_FINITE}"),
    "interval bool": ({"interval": True}, "interval True: expected a number of seconds"),
    "interval of centuries": ({"interval": 1e10}, "must be at most"),
    "timeout 0": ({"timeout": 0}, f"timeout 0: {_NOT_FINITE}, above 0"),
    "timeout negative": ({"timeout": -0.1}, f"timeout -0.1: {_NOT_FINITE}, above 0"),
    "timeout NaN": ({"timeout": math.nan}, f"timeout nan: {_NOT_FINITE}"),
    "timeout infinite": ({"timeout": -math.inf}, f"timeout -inf: {_NOT_FINITE}"),
    "timeout text": ({"timeout": "5"}, "timeout '5': expected a number of seconds"),
    "result_ttl negative": ({"result_ttl": -1}, f"result_ttl -1: {_NOT_FINITE}, 0 or more"),
    "result_ttl NaN": ({"result_ttl": math.nan}, f"result_ttl nan: {_NOT_FINITE}"),
    "cron nonsense": ({"cron": "every day"}, "cron 'every day'"),
    "cron impossible": ({"cron": "0 0 31 2 *"}, "cron '0 0 31 2 *'"),
    "cron number": ({"cron": 5}, "cron 5: expected text"),
    "tz number": ({"tz": 5}, "tz 5: expected text"),
    "tz unknown": ({"cron": "0 0 * * *", "tz": "Mars/Base"}, "tz 'Mars/Base': no such time zone"),
    "unique empty": ({"unique": ""}, "unique '': expected text of 1 to 512 characters"),
    "unique too long": ({"unique": "k" * 513}, "expected text of 1 to 512 characters"),
    "unique number": ({"unique": 5}, "unique 5: expected text"),
    "unique surrogate": ({"unique": "\ud800"}, "not valid Unicode"),
    "unique NUL": ({"unique": "a\0"}, "must not contain a NUL character"),
    "args number": ({"args": 5}, "args must be a tuple"),
    "args text": ({"args": "abc"}, "args must be a tuple"),
    "kwargs list": ({"kwargs": [1]}, "kwargs and metadata must be dictionaries"),
    "kwargs key": (
        {"kwargs": {1: 2}},
        "kwargs and metadata must be dictionaries with text as keys",
    ),
    "metadata None": ({"metadata": None}, "kwargs and metadata must be dictionaries"),
    "metadata key": ({"metadata": {None: 2}}, "must be dictionaries with text as keys"),
    "limit without a size": ({"limits": (Limit(key="k"),)}, "give either max_running or rate"),
    "limit of 0": ({"limits": (Limit(key="k", max_running=0),)}, "max_running 0"),
    "rate of 0": ({"limits": (Limit(key="k", rate=0),)}, "rate 0"),
    "rate per nothing": ({"limits": (Limit(key="k", rate=1, per=0),)}, f"per 0: {_NOT_FINITE}"),
    "breaker without a name": ({"breakers": (BreakerRule(name=""),)}, "breaker name ''"),
    "breaker of 0": ({"breakers": (BreakerRule(name="b", max_failures=0),)}, "max_failures 0"),
}
"""Fields that are refused, with a part of the error message, which is the same on every backend."""

_MANY = 600
"""More tasks than a backend may write in one statement."""


def _many_ids() -> list[str]:
    return [f"n{number}" for number in range(_MANY)]


async def _is_empty(storage: BaseStorage) -> bool:
    counted = await storage.stats()
    return await storage.list_tasks() == [] and sum(counted.by_status.values()) == 0


class EnqueueContract(ContractPart):
    """E1 to E9."""

    @promise("E1", "Q1")
    async def test_an_acknowledged_task_exists_when_another_owner_opens_the_store(
        self, storage: BaseStorage, open_another: OpenAnother
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.close()
        later = await open_another()

        assert ids(await later.list_tasks()) == ["a"]
        assert ids(await later.reserve(5)) == ["a"]

    async def test_the_id_of_the_task_is_returned(self, storage: BaseStorage) -> None:
        task = a_task()

        assert await storage.enqueue(task) == task.id
        assert await status_of(storage, task.id) is TaskStatus.PENDING

    @promise("E2")
    async def test_the_id_of_a_waiting_task_is_taken(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))

        with pytest.raises(DuplicateTask) as refused:
            await storage.enqueue(a_task("a", priority=9))
        assert refused.value.task_id == "a"
        assert [task.priority for task in await storage.list_tasks()] == [0]

    @promise("E2")
    async def test_the_id_of_a_running_task_is_taken(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)

        with pytest.raises(DuplicateTask):
            await storage.enqueue(a_task("a"))

    @promise("E2")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_the_id_of_a_finished_task_with_a_record_is_taken(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a"))
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])

        with pytest.raises(DuplicateTask):
            await storage.enqueue(a_task("a"))

    @promise("E2")
    async def test_one_of_many_concurrent_enqueues_of_an_id_succeeds(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        attempts = (owner.enqueue(a_task("a")) for owner in owners for _ in range(3))
        replies = await asyncio.gather(*attempts, return_exceptions=True)

        assert replies.count("a") == 1
        assert sum(isinstance(reply, DuplicateTask) for reply in replies) == 11

    @promise("E3")
    async def test_a_unique_key_that_is_held_returns_the_id_of_its_holder(
        self, storage: BaseStorage
    ) -> None:
        first = await storage.enqueue(a_task("a", unique="key"))
        second = await storage.enqueue(a_task("b", unique="key"))
        other = await storage.enqueue(a_task("c", unique="other"))

        assert (first, second, other) == ("a", "a", "c")
        assert ids(await storage.list_tasks()) == ["a", "c"]

    @promise("E3")
    async def test_a_batch_takes_a_unique_key_once(self, storage: BaseStorage) -> None:
        enqueued = await storage.enqueue_many(some_tasks("abc", unique="key"))

        assert enqueued == ["a", "a", "a"]
        assert ids(await storage.list_tasks()) == ["a"]

    @promise("E2", "E7")
    @pytest.mark.parametrize("others", [0, 600])
    async def test_a_taken_id_is_found_although_its_unique_key_is_taken_in_the_same_batch(
        self, storage: BaseStorage, others: int
    ) -> None:
        await storage.enqueue(a_task("a"))
        batch = [
            *some_tasks([f"other-{number}" for number in range(others)]),
            *some_tasks("ba", unique="key"),
        ]

        with pytest.raises(DuplicateTask, match="a"):
            await storage.enqueue_many(batch)

        assert ids(await storage.list_tasks()) == ["a"]

    @promise("E3")
    async def test_one_of_many_concurrent_enqueues_of_a_unique_key_adds_a_task(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another() for _ in range(4)]
        replies = await asyncio.gather(*(owner.enqueue(a_task(unique="k")) for owner in owners))

        assert len(set(replies)) == 1
        assert ids(await owners[0].list_tasks()) == [replies[0]]

    @promise("E3")
    async def test_a_unique_key_is_held_while_its_task_runs(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        await storage.reserve(1)

        assert await storage.enqueue(a_task("b", unique="key")) == "a"

    @promise("E3")
    @pytest.mark.parametrize("kind", [*RELEASING_KINDS, "held"])
    async def test_a_unique_key_is_held_by_a_task_that_will_run_again(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])

        assert await storage.enqueue(a_task("b", unique="key")) == "a"

    @promise("E3", "R5")
    @pytest.mark.parametrize("kind", FINAL_KINDS)
    async def test_a_unique_key_is_free_once_its_task_has_ended(
        self, storage: BaseStorage, clock: ManualClock, kind: OutcomeKind
    ) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        await storage.record([an_outcome(kind, await claim_one(storage), clock.now())])

        assert await storage.enqueue(a_task("b", unique="key")) == "b"

    @promise("E3")
    async def test_a_unique_key_is_free_once_its_waiting_task_was_cancelled(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a", unique="key"))
        await storage.cancel("a")

        assert await storage.enqueue(a_task("b", unique="key")) == "b"

    @promise("E3")
    async def test_a_unique_key_may_be_any_text(self, storage: BaseStorage) -> None:
        key = "user/7: ünïcode 🦊 ../'\";--%"

        assert await storage.enqueue(a_task("a", unique=key)) == "a"
        assert await storage.enqueue(a_task("b", unique=key)) == "a"
        assert await storage.enqueue(a_task("c", unique=key.upper())) == "c"

    @promise("E4")
    @pytest.mark.parametrize(
        ("fields", "message"),
        BAD_TASKS.values(),
        ids=[name.replace(" ", "-") for name in BAD_TASKS],
    )
    async def test_a_bad_value_is_refused_before_anything_is_written(
        self, storage: BaseStorage, fields: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InvalidTask) as refused:
            await storage.enqueue(a_task(**fields))

        assert message in str(refused.value)
        assert len(str(refused.value)) < 400
        assert await _is_empty(storage)

    @promise("E4")
    async def test_a_payload_over_the_limit_is_refused_before_anything_is_written(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(settings=Settings(max_payload=1000))
        with pytest.raises(SerializationError, match="more than max_payload 1000") as refused:
            await storage.enqueue(a_task("a", args=("x" * 1000,)))

        assert "task a takes" in str(refused.value)
        assert await _is_empty(storage)
        assert await storage.enqueue(a_task("a", args=("x" * 500,))) == "a"

    @promise("E5")
    async def test_a_full_queue_refuses_and_writes_nothing(self, open_another: OpenAnother) -> None:
        storage = await open_another(max_pending=2)
        await storage.enqueue_many(some_tasks("ab"))

        with pytest.raises(QueueFull) as refused:
            await storage.enqueue(a_task("c"))
        assert refused.value.max_pending == 2
        assert ids(await storage.list_tasks()) == ["a", "b"]

    @promise("E5")
    async def test_only_waiting_tasks_count_towards_the_bound(
        self, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        storage = await open_another(max_pending=1)
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)

        assert await storage.enqueue(a_task("b", eta=clock.now() + timedelta(days=1))) == "b"
        await storage.record([an_outcome("released", task, clock.now())])
        with pytest.raises(QueueFull):
            await storage.enqueue(a_task("c"))

    @promise("E5", "E3")
    async def test_a_full_queue_still_returns_the_holder_of_a_unique_key(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(max_pending=1)
        await storage.enqueue(a_task("a", unique="key"))

        assert await storage.enqueue(a_task("b", unique="key")) == "a"

    @promise("E5")
    async def test_the_bound_is_exact_where_the_backend_says_so(
        self, open_another: OpenAnother
    ) -> None:
        owners = [await open_another(max_pending=5) for _ in range(4)]
        attempts = (owner.enqueue(a_task()) for owner in owners for _ in range(5))
        replies = await asyncio.gather(*attempts, return_exceptions=True)

        added = sum(isinstance(reply, str) for reply in replies)
        assert added >= 5
        if owners[0].capabilities.exact_bound:
            assert added == 5

    @promise("E7", "E5")
    async def test_a_batch_that_does_not_fit_is_refused_as_a_whole(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(max_pending=2)

        with pytest.raises(QueueFull):
            await storage.enqueue_many(some_tasks("abc"))
        assert await _is_empty(storage)
        assert await storage.enqueue_many(some_tasks("ab")) == ["a", "b"]

    @promise("E7")
    async def test_a_batch_with_a_bad_task_is_refused_as_a_whole(
        self, storage: BaseStorage
    ) -> None:
        with pytest.raises(InvalidTask):
            await storage.enqueue_many([a_task("a"), a_task("b", max_retries=-1), a_task("c")])

        assert await _is_empty(storage)

    @promise("E7")
    async def test_a_batch_with_a_task_that_cannot_be_encoded_is_refused_as_a_whole(
        self, storage: BaseStorage
    ) -> None:
        with pytest.raises(SerializationError):
            await storage.enqueue_many([a_task("a"), a_task("b", args=(object(),))])

        assert await _is_empty(storage)

    @promise("E7")
    async def test_a_batch_with_a_taken_id_is_refused_as_a_whole(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("c"))

        with pytest.raises(DuplicateTask) as refused:
            await storage.enqueue_many(some_tasks("abcd"))
        assert refused.value.task_id == "c"
        assert ids(await storage.list_tasks()) == ["c"]

    @promise("E7")
    async def test_a_batch_with_one_id_twice_is_refused_as_a_whole(
        self, storage: BaseStorage
    ) -> None:
        with pytest.raises(DuplicateTask):
            await storage.enqueue_many(some_tasks("aba"))

        assert await _is_empty(storage)

    @promise("E7")
    @pytest.mark.parametrize(
        ("last", "error"),
        [
            ({"id": "bad", "max_retries": -1}, InvalidTask),
            ({"id": "bad", "args": (object(),)}, SerializationError),
            ({"id": "taken"}, DuplicateTask),
            ({"id": "n0"}, DuplicateTask),
        ],
        ids=["bad", "not encodable", "taken", "twice"],
    )
    async def test_a_large_batch_is_refused_as_a_whole_for_its_last_task(
        self, storage: BaseStorage, last: dict[str, Any], error: type[Exception]
    ) -> None:
        await storage.enqueue(a_task("taken"))

        with pytest.raises(error):
            await storage.enqueue_many([*some_tasks(_many_ids()), a_task(**last)])
        assert ids(await storage.list_tasks()) == ["taken"]
        assert await storage.enqueue(a_task("n0")) == "n0"

    @promise("E7", "E5")
    async def test_a_large_batch_that_does_not_fit_is_refused_as_a_whole(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(max_pending=_MANY)

        with pytest.raises(QueueFull):
            await storage.enqueue_many(some_tasks([*_many_ids(), "one-too-many"]))
        assert await _is_empty(storage)
        assert await storage.enqueue_many(some_tasks(_many_ids())) == _many_ids()

    @promise("E9", "E3")
    async def test_a_large_batch_is_claimed_in_its_order_and_takes_a_unique_key_once(
        self, storage: BaseStorage
    ) -> None:
        tasks = [
            a_task("first", unique="key"),
            *some_tasks(_many_ids()),
            a_task("last", unique="key"),
        ]

        assert await storage.enqueue_many(tasks) == ["first", *_many_ids(), "first"]
        assert ids(await storage.reserve(_MANY + 2)) == ["first", *_many_ids()]

    async def test_an_empty_batch_has_no_effect(self, storage: BaseStorage) -> None:
        assert await storage.enqueue_many([]) == []

    @promise("E8")
    async def test_a_repeat_with_the_same_nonce_counts_as_done(self, storage: BaseStorage) -> None:
        first = await storage.enqueue_many(some_tasks("ab"), nonce="call-1")
        again = await storage.enqueue_many(some_tasks("abc"), nonce="call-1")

        assert (first, again) == (["a", "b"], ["a", "b", "c"])
        assert ids(await storage.list_tasks()) == ["a", "b", "c"]

    @promise("E8")
    async def test_a_repeat_counts_as_done_when_the_task_has_run_meanwhile(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("a"), nonce="call-1")
        await storage.record([an_outcome("succeeded", await claim_one(storage), clock.now())])

        assert await storage.enqueue_many(some_tasks("a"), nonce="call-1") == ["a"]
        assert await status_of(storage, "a") is TaskStatus.SUCCESS

    @promise("E8")
    async def test_a_repeat_counts_as_done_when_the_queue_is_full(
        self, open_another: OpenAnother
    ) -> None:
        storage = await open_another(max_pending=1)
        await storage.enqueue_many(some_tasks("a", unique="key"), nonce="call-1")

        assert await storage.enqueue_many(some_tasks("a", unique="key"), nonce="call-1") == ["a"]

    @promise("E8")
    async def test_a_call_with_another_nonce_is_a_new_call(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("a"), nonce="call-1")

        with pytest.raises(DuplicateTask):
            await storage.enqueue_many(some_tasks("a"), nonce="call-2")

    @promise("E9")
    async def test_a_batch_is_claimed_in_its_order(self, storage: BaseStorage) -> None:
        await storage.enqueue_many(some_tasks("zbya"))
        await storage.enqueue_many(some_tasks("xc"))

        assert ids(await storage.reserve(10)) == ["z", "b", "y", "a", "x", "c"]

    async def test_a_time_in_any_time_zone_is_the_same_instant(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        eta = (clock.now() + timedelta(seconds=1)).astimezone(timezone(timedelta(hours=14)))
        await storage.enqueue(a_task("a", eta=eta))
        task = await storage.get_task("a")

        assert task is not None
        assert task.eta == eta
        assert task.eta.tzinfo is UTC
        assert await storage.reserve(1) == []
        clock.advance(1)
        assert ids(await storage.reserve(1)) == ["a"]
