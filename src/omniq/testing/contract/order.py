"""Order: which of the due tasks a claim returns first."""

from __future__ import annotations

from datetime import timedelta

from omniq.outcomes import Released, Retried
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ContractPart, OpenAnother, claim_one, ids, promise


class OrderContract(ContractPart):
    """C4."""

    @promise("C4")
    async def test_order_is_priority_then_eta_then_order_of_enqueue(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        now = clock.now()
        for task_id, priority, age in [
            ("e", 0, 5),
            ("f", 0, 5),
            ("d", 0, 9),
            ("g", -1, 99),
            ("a", 7, 0),
            ("b", 7, 0),
            ("c", 3, 1),
        ]:
            await storage.enqueue(
                a_task(task_id, priority=priority, eta=now - timedelta(seconds=age))
            )

        assert ids(await storage.reserve(4)) == ["a", "b", "c", "d"]
        assert ids(await storage.reserve(4)) == ["e", "f", "g"]

    @promise("C4")
    async def test_claims_of_one_task_each_follow_the_order(self, storage: BaseStorage) -> None:
        priorities = {"a": 1, "b": 3, "c": 3, "d": 2}
        await storage.enqueue_many([a_task(x, priority=p) for x, p in priorities.items()])

        assert [(await claim_one(storage)).id for _ in range(4)] == ["b", "c", "d", "a"]

    @promise("C4")
    async def test_the_order_holds_across_queues(self, storage: BaseStorage) -> None:
        for task_id, queue, priority in [
            ("a", "x", 1),
            ("b", "y", 2),
            ("c", "x", 3),
            ("d", "z", 2),
        ]:
            await storage.enqueue(a_task(task_id, queue=queue, priority=priority))

        assert ids(await storage.reserve(10)) == ["c", "b", "d", "a"]

    @promise("C4", "C6")
    async def test_the_order_holds_across_many_queues(self, storage: BaseStorage) -> None:
        tasks = [
            a_task(f"t{n:02}", queue="default" if n % 4 == 0 else f"q{n}", priority=n % 3)
            for n in range(40)
        ]
        await storage.enqueue_many(tasks)
        in_order = ids(sorted(tasks, key=lambda task: -task.priority))

        assert ids(await storage.reserve(7)) == in_order[:7]
        assert ids(await storage.reserve(3, queues=["q39", "q38", "q1"])) == ["t38", "t01", "t39"]
        await storage.pause_queue("default")
        left = [each for each in in_order[7:] if each not in ("t38", "t01", "t39")]
        waiting = [each for each in left if int(each[1:]) % 4]
        assert ids(await storage.reserve(30)) == waiting
        await storage.resume_queue("default")
        assert ids(await storage.reserve(30)) == [each for each in left if each not in waiting]

    @promise("C4")
    async def test_a_retried_task_is_ordered_by_its_new_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("ab"))
        first = await claim_one(storage)
        await storage.record(
            [Retried(first.id, first.token, an_error(), clock.now() + timedelta(seconds=2))]
        )
        clock.advance(1)
        await storage.enqueue(a_task("c"))
        clock.advance(5)
        await storage.enqueue(a_task("d"))

        assert ids(await storage.reserve(10)) == ["b", "c", "a", "d"]

    @promise("C4")
    async def test_a_retried_task_keeps_its_priority(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", priority=5))
        first = await claim_one(storage)
        await storage.enqueue(a_task("b"))
        clock.advance(5)
        await storage.record([Retried("a", first.token, an_error(), clock.now())])

        assert ids(await storage.reserve(10)) == ["a", "b"]

    @promise("C4")
    async def test_all_owners_share_one_order_of_enqueue(self, open_another: OpenAnother) -> None:
        owners = [await open_another() for _ in range(3)]
        for number, task_id in enumerate("zaybxc"):
            await owners[number % 3].enqueue(a_task(task_id))

        assert ids(await owners[0].reserve(10)) == ["z", "a", "y", "b", "x", "c"]

    @promise("C4")
    async def test_tasks_retried_for_the_same_eta_are_claimed_in_order_of_enqueue(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("cab"))
        eta = clock.now() + timedelta(seconds=3)
        for task in reversed(await storage.reserve(3)):
            await storage.record([Retried(task.id, task.token, an_error(), eta)])
        clock.advance(3)

        assert ids(await storage.reserve(10)) == ["c", "a", "b"]

    @promise("C4")
    async def test_a_released_task_keeps_its_place(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("abc"))
        first = await claim_one(storage)
        clock.advance(5)
        await storage.record([Released(first.id, first.token)])

        assert ids(await storage.reserve(10)) == ["a", "b", "c"]

    @promise("C4")
    async def test_delayed_tasks_that_are_due_are_claimed_in_the_order_of_their_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        for task_id, seconds in [("c", 3), ("a", 1), ("d", 3), ("b", 2)]:
            await storage.enqueue(a_task(task_id, eta=clock.now() + timedelta(seconds=seconds)))
        clock.advance(5)

        assert ids(await storage.reserve(10)) == ["a", "b", "c", "d"]
