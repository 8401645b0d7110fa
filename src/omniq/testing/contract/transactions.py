"""Transactions: tasks enqueued in a user's transaction, and successes recorded in a task's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, get_args

import pytest

from omniq.errors import DuplicateTask, InvalidTask, QueueFull, SerializationError, StaleClaim
from omniq.models import Task, TaskStatus
from omniq.outcomes import Succeeded
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    OutcomeKind,
    a_member,
    a_result,
    a_task,
    an_outcome,
    some_tasks,
)
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import (
    LEASE,
    ContractPart,
    OpenAnother,
    claim_one,
    ids,
    promise,
    status_of,
    visible_state,
)
from omniq.testing.contract.fairness import tasks_of


class UserConnection(Protocol):
    """A user's connection to the database of the store under test, with a table of notes.

    A backend with transactions provides one as the fixture `user_connection`.
    """

    @property
    def connection(self) -> object:
        """The connection that a test passes to `enqueue_within`."""
        ...

    async def begin(self) -> None: ...

    async def commit(self) -> None: ...

    async def roll_back(self) -> None: ...

    async def write(self, note: str, connection: Any = None) -> None:
        """Insert a note, through the user's connection or one that `transaction` yielded."""
        ...

    def write_blocking(self, note: str, connection: Any) -> None:
        """The same from a thread, through a connection of `transaction(blocking=True)`."""
        ...

    async def notes(self) -> list[str]:
        """Return the committed notes as other connections see them, in alphabetical order."""
        ...

    async def autocommit_connection(self) -> object:
        """Return a connection to the same database in autocommit mode."""
        ...

    async def other_database_connection(self) -> object:
        """Return a connection, in a transaction, to a database without this store."""
        ...


def success_of(task: Task, value: object = "done", **fields: Any) -> Callable[[], Succeeded]:
    """Return a function that makes the success of the claim, for `transaction`."""
    return lambda: Succeeded(task.id, task.token, a_result(task, value), **fields)


class TransactionContract(ContractPart):
    """N1 to N6. For backends without transactions only the refusal is tested."""

    @pytest.fixture
    async def user_connection(self) -> UserConnection | None:
        return None

    @pytest.fixture
    async def user(
        self, storage: BaseStorage, user_connection: UserConnection | None
    ) -> UserConnection:
        if not storage.capabilities.transactions:
            pytest.skip(f"{storage.capabilities.name} has no transactions")
        assert user_connection is not None, "define a fixture `user_connection`"
        return user_connection

    # Enqueue

    @promise("N1")
    async def test_tasks_enqueued_within_a_transaction_appear_with_its_commit(
        self, storage: BaseStorage, open_another: OpenAnother, user: UserConnection
    ) -> None:
        other = await open_another()
        await user.begin()
        await user.write("order")
        enqueued = await storage.enqueue_within(user.connection, some_tasks("ab"))
        assert await other.get_task("a") is None
        assert await user.notes() == []
        await user.commit()

        assert enqueued == ["a", "b"]
        assert await user.notes() == ["order"]
        assert ids(await other.reserve(5)) == ["a", "b"]

    @promise("N1")
    async def test_tasks_enqueued_within_a_transaction_disappear_with_its_rollback(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        before = await visible_state(storage)
        await user.begin()
        await user.write("order")
        await storage.enqueue_within(user.connection, [a_task("a", unique="k")])
        await user.roll_back()

        assert await visible_state(storage) == before
        assert await user.notes() == []
        assert await storage.enqueue(a_task("a", unique="k")) == "a"

    @promise("F20")
    async def test_a_wait_that_is_enqueued_within_a_transaction_locks_nothing_of_workers(
        self, storage: BaseStorage, open_another: OpenAnother, user: UserConnection
    ) -> None:
        other = await open_another()
        await other.enqueue_many(some_tasks("ab"))
        first, second = await other.reserve(2)
        await user.begin()
        flow = [
            a_member("f", kind="group"),
            a_member("f.x", parent="f", after=("a",)),
            a_member("f.y", parent="f", after=("f.x", "b")),
        ]
        assert await storage.enqueue_within(user.connection, flow) == ["f", "f.x", "f.y"]
        if storage.capabilities.name == "postgresql":
            # A worker ends the source while the transaction is open; SQLite has one writer.
            await other.record([Succeeded("a", first.token, a_result(first))])
        await user.commit()
        if storage.capabilities.name != "postgresql":
            await other.record([Succeeded("a", first.token, a_result(first))])

        assert await other.reserve(5) == []
        while await other.advance_flows():
            pass
        (claimed,) = await other.reserve(5)
        assert claimed.id == "f.x"
        await other.record(
            [
                Succeeded("f.x", claimed.token, a_result(claimed)),
                Succeeded("b", second.token, a_result(second)),
            ]
        )
        assert ids(await other.reserve(5)) == ["f.y"]

    @promise("F20", "E10")
    async def test_a_sequence_is_joined_after_the_commit_and_locks_nothing_of_workers(
        self, storage: BaseStorage, open_another: OpenAnother, user: UserConnection
    ) -> None:
        other = await open_another()
        await other.enqueue(a_member("a", sequence="k"))
        (first,) = await other.reserve(2)
        await user.begin()
        tasks = [a_member(each, sequence="k") for each in "bc"]
        assert await storage.enqueue_within(user.connection, tasks) == ["b", "c"]
        if storage.capabilities.name == "postgresql":
            # A worker ends the last task of the sequence while the transaction is open.
            await other.record([Succeeded("a", first.token, a_result(first))])
        await user.commit()
        if storage.capabilities.name != "postgresql":
            await other.record([Succeeded("a", first.token, a_result(first))])

        assert await other.reserve(5) == []
        while await other.advance_flows():
            pass
        for task_id in "bc":
            (claimed,) = await other.reserve(5)
            assert claimed.id == task_id
            await other.record([Succeeded(task_id, claimed.token, a_result(claimed))])

    @promise("N1", "C13")
    async def test_tasks_take_their_turns_after_the_commit_and_keep_no_producer_waiting(
        self, storage: BaseStorage, open_another: OpenAnother, user: UserConnection
    ) -> None:
        other = await open_another()
        await other.enqueue_many(tasks_of("a", range(3)))
        await user.begin()
        await storage.enqueue_within(user.connection, tasks_of("b", range(2)))
        if storage.capabilities.name == "postgresql":
            # Another producer of the same key, while the transaction is open.
            await other.enqueue_many(tasks_of("b", range(2, 3)))
        await user.commit()
        if storage.capabilities.name != "postgresql":
            await other.enqueue_many(tasks_of("b", range(2, 3)))

        assert ids(await other.reserve(6)) == ["a0", "b2", "a1", "b0", "a2", "b1"]

    @promise("F20")
    async def test_a_flow_of_a_transaction_that_is_rolled_back_never_existed(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a"))
        await user.begin()
        waiting = a_member("b", after=("a",))
        await storage.enqueue_within(user.connection, [waiting])
        await user.roll_back()

        assert not await storage.advance_flows()
        assert await storage.get_task("b") is None

    @promise("N1")
    async def test_one_transaction_may_enqueue_repeatedly(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("0"))
        await user.begin()
        for task_id in "abc":
            assert await storage.enqueue_within(user.connection, [a_task(task_id)]) == [task_id]
        await user.commit()

        assert ids(await storage.reserve(9)) == ["0", "a", "b", "c"]

    @promise("N1")
    async def test_a_large_batch_within_a_transaction_is_returned_unchanged(
        self, storage: BaseStorage, clock: ManualClock, user: UserConnection
    ) -> None:
        later = clock.now() + timedelta(minutes=1)
        tasks = [
            a_task(f"t{number:04}", args=(number, "ж"), priority=number % 3, eta=later)
            for number in range(600)
        ]
        await user.begin()
        await storage.enqueue_within(user.connection, tasks)
        await user.commit()
        assert await storage.reserve(1) == []
        clock.advance(60)
        claimed = await storage.reserve(600)

        assert ids(claimed) == [task.id for task in sorted(tasks, key=lambda task: -task.priority)]
        assert {task.id: task.args for task in claimed} == {task.id: task.args for task in tasks}

    @promise("N2")
    async def test_a_taken_id_is_refused_and_the_transaction_continues(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a"))
        await user.begin()
        await user.write("order")
        with pytest.raises(DuplicateTask):
            await storage.enqueue_within(user.connection, some_tasks("ba"))
        await storage.enqueue_within(user.connection, [a_task("c")])
        await user.commit()

        assert ids(await storage.list_tasks()) == ["a", "c"]
        assert await user.notes() == ["order"]

    @promise("N2")
    async def test_a_refusal_as_the_first_call_leaves_the_transaction_unchanged(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a"))
        await user.begin()
        with pytest.raises(DuplicateTask):
            await storage.enqueue_within(user.connection, [a_task("a")])
        await user.write("order")
        await user.commit()

        assert await user.notes() == ["order"]
        assert ids(await storage.list_tasks()) == ["a"]

    @promise("N2")
    async def test_a_full_queue_refuses_tasks_within_a_transaction(
        self, open_another: OpenAnother, user: UserConnection
    ) -> None:
        bounded = await open_another(max_pending=2)
        await bounded.enqueue(a_task("a"))
        await user.begin()
        await bounded.enqueue_within(user.connection, [a_task("b")])
        with pytest.raises(QueueFull):
            await bounded.enqueue_within(user.connection, [a_task("c")])
        await user.commit()

        assert ids(await bounded.list_tasks()) == ["a", "b"]

    @promise("N2")
    async def test_a_unique_key_that_is_held_returns_the_id_of_its_holder_within_a_transaction(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a", unique="k"))
        await user.begin()
        tasks = [a_task("b", unique="k"), a_task("c", unique="l"), a_task("d", unique="l")]
        enqueued = await storage.enqueue_within(user.connection, tasks)
        await user.commit()

        assert enqueued == ["a", "c", "c"]
        assert ids(await storage.list_tasks()) == ["a", "c"]

    @promise("N2")
    async def test_a_repeat_with_the_same_nonce_counts_as_done_within_a_transaction(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await user.begin()
        for _ in range(2):
            enqueued = await storage.enqueue_within(user.connection, [a_task("a")], nonce="n")
            assert enqueued == ["a"]
        await user.commit()

        assert ids(await storage.list_tasks()) == ["a"]

    @promise("N2")
    async def test_bad_values_are_refused_before_the_connection_is_used(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await user.begin()
        with pytest.raises(InvalidTask):
            await storage.enqueue_within(user.connection, [a_task("a", args=(object(),))])
        with pytest.raises(DuplicateTask):
            await storage.enqueue_within(user.connection, [a_task("a"), a_task("a")])
        assert await storage.enqueue_within(user.connection, []) == []
        await user.commit()

        assert await storage.list_tasks() == []

    @promise("N3")
    async def test_a_connection_of_another_kind_is_refused(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        for nonsense in (object(), "connection", None):
            with pytest.raises(InvalidTask):
                await storage.enqueue_within(nonsense, [a_task("a")])

        assert await storage.list_tasks() == []

    @promise("N3")
    async def test_a_connection_in_autocommit_mode_is_refused(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        with pytest.raises(InvalidTask):
            await storage.enqueue_within(await user.autocommit_connection(), [a_task("a")])

        assert await storage.list_tasks() == []

    @promise("N3")
    async def test_a_connection_to_another_store_is_refused(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        with pytest.raises(InvalidTask):
            await storage.enqueue_within(await user.other_database_connection(), [a_task("a")])

        assert await storage.list_tasks() == []

    @promise("N3")
    async def test_a_backend_without_transactions_refuses_them(self, storage: BaseStorage) -> None:
        if storage.capabilities.transactions:
            return
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        with pytest.raises(InvalidTask, match="has no transactions"):
            await storage.enqueue_within(object(), [a_task("b")])
        with pytest.raises(InvalidTask, match="has no transactions"):
            async with storage.transaction("a", task.token, success_of(task)):
                pytest.fail("a backend without transactions opened one")

        assert await storage.held_by(storage.owner) == {"a": 1}

    # Complete a task

    @promise("N4")
    @pytest.mark.parametrize("blocking", [False, True])
    async def test_leaving_the_block_commits_the_users_rows_and_the_success(
        self,
        storage: BaseStorage,
        open_another: OpenAnother,
        user: UserConnection,
        blocking: bool,
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a", unique="k"))
        task = await claim_one(storage)
        success = success_of(task, {"sum": 3})
        async with storage.transaction("a", task.token, success, blocking=blocking) as connection:
            if blocking:
                await asyncio.to_thread(user.write_blocking, "paid", connection)
            else:
                await user.write("paid", connection)
            assert await user.notes() == []
            assert await status_of(other, "a") is TaskStatus.RUNNING
        result = await other.get_result("a")

        assert await user.notes() == ["paid"]
        assert result is not None
        assert (result.status, result.result) == (TaskStatus.SUCCESS, {"sum": 3})
        assert await other.held_by(storage.owner) == {}
        assert await other.enqueue(a_task("b", unique="k")) == "b"

    @promise("N4")
    async def test_an_exception_rolls_both_back_and_the_claim_stays_valid(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        before = await visible_state(storage)

        async def write_and_fail() -> None:
            async with storage.transaction("a", 1, success_of(task)) as connection:
                await user.write("paid", connection)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await write_and_fail()
        assert await visible_state(storage) == before
        assert await user.notes() == []

        async with storage.transaction("a", 1, success_of(task)) as connection:
            await user.write("paid again", connection)

        assert await status_of(storage, "a") is TaskStatus.SUCCESS
        assert await user.notes() == ["paid again"]

    @promise("N4")
    async def test_a_success_that_cannot_be_encoded_rolls_both_back(
        self, storage: BaseStorage, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        with pytest.raises(SerializationError):
            async with storage.transaction("a", 1, success_of(task, object())) as connection:
                await user.write("paid", connection)

        assert await user.notes() == []
        assert await storage.held_by(storage.owner) == {"a": 1}
        assert await storage.record([an_outcome("released", task, storage.clock.now())]) == [True]

    @promise("N4")
    async def test_a_repeating_task_completed_in_a_transaction_waits_for_its_next_run(
        self, storage: BaseStorage, clock: ManualClock, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a", interval=60.0))
        task = await claim_one(storage)
        later = clock.now() + timedelta(seconds=60)
        async with storage.transaction("a", 1, success_of(task, 1, next_eta=later)) as connection:
            await user.write("tick", connection)
        result = await storage.get_result("a")
        assert result is not None
        assert result.result == 1
        assert await storage.reserve(1) == []
        clock.advance(60)

        assert (await claim_one(storage)).token == 2

    @promise("N5")
    async def test_nothing_is_committed_when_another_owner_has_claimed_the_task(
        self,
        storage: BaseStorage,
        open_another: OpenAnother,
        clock: ManualClock,
        user: UserConnection,
    ) -> None:
        other = await open_another()
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        clock.advance(LEASE)
        await other.give_back_abandoned()
        await claim_one(other)
        before = await visible_state(other)
        with pytest.raises(StaleClaim):
            async with storage.transaction("a", task.token, success_of(task)) as connection:
                await user.write("paid", connection)

        assert await visible_state(other) == before
        assert await user.notes() == []

    @promise("N5")
    @pytest.mark.parametrize("kind", get_args(OutcomeKind))
    async def test_nothing_is_committed_when_the_claim_has_ended(
        self, storage: BaseStorage, clock: ManualClock, user: UserConnection, kind: OutcomeKind
    ) -> None:
        if kind == "held":
            return
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([an_outcome(kind, task, clock.now())])
        before = await visible_state(storage)
        with pytest.raises(StaleClaim):
            async with storage.transaction("a", task.token, success_of(task)) as connection:
                await user.write("paid", connection)

        assert await visible_state(storage) == before
        assert await user.notes() == []

    @promise("N6")
    @pytest.mark.parametrize("ttl", [None, 0.0])
    @pytest.mark.parametrize("kind", get_args(OutcomeKind))
    async def test_an_outcome_recorded_after_the_commit_changes_nothing(
        self,
        storage: BaseStorage,
        clock: ManualClock,
        user: UserConnection,
        kind: OutcomeKind,
        ttl: float | None,
    ) -> None:
        await storage.enqueue(a_task("a", result_ttl=ttl))
        task = await claim_one(storage)
        async with storage.transaction("a", 1, success_of(task)) as connection:
            await user.write("paid", connection)
        before = await visible_state(storage)
        late = an_outcome(kind, task, clock.now())
        assert storage.claims == {"a": 1}

        assert await storage.record([late]) == [True]
        assert await visible_state(storage) == before
        assert storage.claims == {}

    @promise("N6")
    async def test_other_outcomes_and_claims_of_the_same_call_are_unaffected_by_the_commit(
        self, storage: BaseStorage, clock: ManualClock, user: UserConnection
    ) -> None:
        await storage.enqueue_many(some_tasks("abcd"))
        a, b, c = await storage.reserve(3)
        async with storage.transaction("b", 1, success_of(b)) as connection:
            await user.write("paid", connection)
        outcomes = [an_outcome("failed", task, clock.now()) for task in (a, b, c)]
        recorded, claimed = await storage.record_and_reserve(outcomes, 5)

        assert recorded == [True, True, True]
        assert ids(claimed) == ["d"]
        assert storage.claims == {"d": 1}
        assert ids(await storage.list_tasks(status=TaskStatus.SUCCESS)) == ["b"]

    @promise("N6")
    async def test_the_outcome_of_the_next_run_is_recorded_after_a_completed_run(
        self, storage: BaseStorage, clock: ManualClock, user: UserConnection
    ) -> None:
        await storage.enqueue(a_task("a", interval=60.0))
        task = await claim_one(storage)
        later = clock.now() + timedelta(seconds=60)
        async with storage.transaction("a", 1, success_of(task, next_eta=later)) as connection:
            await user.write("tick", connection)
        clock.advance(60)
        again = await claim_one(storage)
        assert await storage.record([an_outcome("succeeded", task, later)]) == [True]
        assert storage.claims == {"a": 2}

        assert await storage.record([an_outcome("failed", again, later)]) == [True]
        assert await status_of(storage, "a") is TaskStatus.FAILED
