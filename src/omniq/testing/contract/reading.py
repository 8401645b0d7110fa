"""Reading: a reader sees what the store holds, and reading changes nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from omniq.errors import InvalidTask, InvalidValue
from omniq.models import FairShare, Task, TaskStatus
from omniq.outcomes import Retried, Succeeded
from omniq.storage.base import BaseStorage
from omniq.testing.builders import (
    OutcomeKind,
    a_result,
    a_task,
    an_error,
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
    visible_state,
)

FILTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "waiting": {"status": TaskStatus.PENDING},
    "running": {"status": TaskStatus.RUNNING},
    "succeeded": {"status": TaskStatus.SUCCESS},
    "failed": {"status": TaskStatus.FAILED},
    "queue": {"queue": "q1"},
    "function": {"func_path": "tasks.f2"},
    "queue and function": {"queue": "q0", "func_path": "tasks.f2"},
    "all filters together": {
        "status": TaskStatus.PENDING,
        "queue": "q1",
        "func_path": "tasks.f0",
    },
    "nothing": {"queue": "empty"},
}


async def _fill_store(storage: BaseStorage, clock: ManualClock) -> None:
    """Store 30 tasks over two queues and three functions, in every status."""
    tasks = [a_task(f"t{n:02}", queue=f"q{n % 2}", func_path=f"tasks.f{n % 3}") for n in range(30)]
    await storage.enqueue_many(tasks[::-1])
    kinds: tuple[OutcomeKind, ...] = ("succeeded", "failed", "cancelled", "retried", "held")
    for kind in kinds:
        for task in await storage.reserve(3):
            await storage.record([an_outcome(kind, task, clock.now() + timedelta(days=1))])
    await storage.reserve(5)


async def _fill_store_one_by_one(storage: BaseStorage, clock: ManualClock) -> None:
    """Store 30 tasks as above, with generated ids, enqueued one second apart."""
    for n in range(30):
        clock.advance(1)
        task = a_task(clock.new_id(), queue=f"q{n % 2}", func_path=f"tasks.f{n % 3}")
        await storage.enqueue(task)
    kinds: tuple[OutcomeKind, ...] = ("succeeded", "failed", "cancelled", "retried", "held")
    for kind in kinds:
        for task in await storage.reserve(3):
            await storage.record([an_outcome(kind, task, clock.now() + timedelta(days=1))])
    await storage.reserve(5)


async def _list_all(storage: BaseStorage, size: int, **filters: Any) -> list[str]:
    found: list[str] = []
    while page := await storage.list_tasks(
        limit=size, after=found[-1] if found else None, **filters
    ):
        assert len(page) <= size
        found += ids(page)
    return found


async def _scan_all(storage: BaseStorage, size: int, most: int, **filters: Any) -> list[str]:
    """Return the ids that a series of scans finds, each from the cursor of the last."""
    scan = await storage.scan_tasks(limit=size, max_scanned=most, **filters)
    found = ids(scan.tasks)
    while scan.cursor is not None:
        scan = await storage.scan_tasks(limit=size, max_scanned=most, cursor=scan.cursor, **filters)
        assert len(scan.tasks) <= size
        found += ids(scan.tasks)
    return found


class ReadingContract(ContractPart):
    """Q1 to Q8."""

    @promise("Q1")
    async def test_a_task_is_found_by_its_id_in_every_status(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        reader = await open_another()
        statuses = []

        async def read_status() -> None:
            task = await reader.get_task("a")
            statuses.append(task and task.status)

        await read_status()
        await storage.enqueue(a_task("a"))
        await read_status()
        task = await claim_one(storage)
        await read_status()
        await storage.record([Retried("a", task.token, an_error(), clock.now())])
        await read_status()
        task = await claim_one(storage)
        await storage.record([Succeeded("a", task.token, a_result(task))])
        await read_status()
        await storage.purge_results(clock.now() + timedelta(seconds=1))
        await read_status()

        assert statuses == [
            None,
            TaskStatus.PENDING,
            TaskStatus.RUNNING,
            TaskStatus.RETRYING,
            TaskStatus.SUCCESS,
            None,
        ]

    @promise("Q2")
    async def test_a_status_may_be_given_by_its_name(self, storage: BaseStorage) -> None:
        await storage.enqueue(Task(id="t", func_path="m.f"))

        assert [
            task.id for task in await storage.list_tasks(status=cast(TaskStatus, "pending"))
        ] == ["t"]
        with pytest.raises(InvalidValue, match="expected one of pending"):
            await storage.list_tasks(status=cast(TaskStatus, "asleep"))

    @promise("Q2")
    @pytest.mark.parametrize("filters", FILTERS.values(), ids=list(FILTERS))
    async def test_pages_cover_all_tasks_once_in_the_order_of_ids(
        self, storage: BaseStorage, clock: ManualClock, filters: dict[str, Any]
    ) -> None:
        await _fill_store(storage, clock)
        tasks = await storage.list_tasks(limit=1000)
        expected = [
            task.id
            for task in tasks
            if all(getattr(task, name) == value for name, value in filters.items())
        ]

        assert ids(tasks) == [f"t{n:02}" for n in range(30)]
        for size in (1, 4, 100):
            assert await _list_all(storage, size, **filters) == expected

    @promise("Q2")
    async def test_a_listed_task_equals_the_task_that_get_task_returns(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _fill_store(storage, clock)

        for task in await storage.list_tasks():
            assert task == await storage.get_task(task.id)

    @promise("Q2")
    async def test_pages_include_all_tasks_that_exist_throughout_while_others_come_and_go(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue_many(some_tasks("bdfhjl"))
        first = await storage.list_tasks(limit=2)
        await storage.enqueue_many(some_tasks("aeg"))
        await storage.mark_done("b", a_result(await claim_one(storage)))
        await storage.purge_results(clock.now() + timedelta(seconds=1))
        second = await storage.list_tasks(limit=3, after=first[-1].id)
        await storage.reserve(1)
        third = await storage.list_tasks(limit=10, after=second[-1].id)

        found = ids([*first, *second, *third])
        assert len(found) == len(set(found))
        assert set("dfhjl") <= set(found)
        assert found == sorted(found)

    @promise("Q2")
    async def test_the_size_of_a_page_is_checked(self, storage: BaseStorage) -> None:
        await storage.enqueue(a_task())

        assert await storage.list_tasks(limit=0) == []
        for limit in (-1, 10_001, 2.5, True, None):
            with pytest.raises(InvalidValue, match="expected a whole number from 0 to 10000"):
                await storage.list_tasks(limit=limit)  # type: ignore[arg-type]

    @promise("Q3")
    async def test_the_counts_of_an_empty_store_are_0(self, storage: BaseStorage) -> None:
        stats = await storage.stats()

        assert stats.by_status == dict.fromkeys(TaskStatus, 0)
        assert (stats.by_queue, stats.dead, stats.oldest_due_age) == ({}, 0, 0.0)

    @promise("Q3")
    async def test_each_task_is_counted_once_under_its_status(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _fill_store(storage, clock)
        stats = await storage.stats()
        tasks = await storage.list_tasks()

        assert stats.by_status == {
            status: sum(task.status is status for task in tasks) for status in TaskStatus
        }
        assert set(stats.by_status.values()) == {3, 5, 6, 10}
        live = [task for task in tasks if not task.status.is_final]
        assert stats.by_queue == {
            queue: sum(task.queue == queue for task in live) for queue in ("q0", "q1")
        }
        assert stats.dead == 3
        waiting = [task for task in live if task.status is not TaskStatus.RUNNING]
        assert await storage.count_waiting() == len(waiting)

    @promise("Q3")
    async def test_the_age_of_the_oldest_due_task_counts_from_its_eta(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", eta=clock.now() + timedelta(seconds=10)))
        clock.advance(4)
        before = (await storage.stats()).oldest_due_age
        clock.advance(10)
        waiting = (await storage.stats()).oldest_due_age
        await storage.reserve(1)

        assert (before, waiting) == (0.0, 4.0)
        assert (await storage.stats()).oldest_due_age == 0.0

    @promise("Q4")
    async def test_a_result_before_the_task_has_ended_has_a_status_that_is_not_final(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        before = await storage.get_result("a")
        task = await claim_one(storage)
        running = await storage.get_result("a")
        await storage.record([Retried("a", task.token, an_error("first"), clock.now())])
        retrying = await storage.get_result("a")

        assert (before, running) == (None, None)
        assert retrying is not None
        assert (retrying.status, retrying.error) == (TaskStatus.RETRYING, an_error("first"))
        assert (retrying.attempts, retrying.result) == (1, None)
        assert await storage.get_result("unknown") is None

    @promise("Q5")
    async def test_changing_a_task_that_was_read_does_not_change_the_store(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a", args=([1],), kwargs={"k": []}, metadata={"m": {}}))
        seen = await storage.get_task("a")
        assert seen is not None
        seen.args[0].append(2)
        seen.kwargs["k"].append(2)
        seen.metadata["m"]["x"] = 2
        (listed,) = await storage.list_tasks()
        listed.args[0].append(3)
        claimed = await claim_one(storage)

        assert (claimed.args, claimed.kwargs, claimed.metadata) == (([1],), {"k": []}, {"m": {}})
        claimed.args[0].append(4)
        again = await storage.get_task("a")
        assert again is not None
        assert again.args == ([1],)

    @promise("Q5")
    async def test_changing_a_result_that_was_read_does_not_change_the_store(
        self, storage: BaseStorage
    ) -> None:
        await storage.enqueue(a_task("a"))
        value = [1]
        await storage.mark_done("a", a_result(await claim_one(storage), value))
        value.append(2)
        first = await storage.get_result("a")
        assert first is not None
        first.result.append(3)
        second = await storage.get_result("a")

        assert second is not None
        assert second.result == [1]

    @promise("Q5")
    async def test_reading_changes_nothing(
        self, storage: BaseStorage, open_another: OpenAnother, clock: ManualClock
    ) -> None:
        await _fill_store(storage, clock)
        reader = await open_another()
        before = await visible_state(storage)
        await visible_state(reader)
        await reader.workers()
        await reader.held_by(storage.owner)
        await reader.paused_queues()
        await reader.list_schedules()
        await reader.get_progress("t00")

        assert await visible_state(storage) == before

    @promise("Q6", "R4")
    async def test_the_history_has_the_first_failure_and_the_newest_ones_in_order(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a", max_retries=100))
        for number in range(1, 31):
            task = await claim_one(storage)
            clock.advance(1)
            error = an_error(f"failure {number}")
            await storage.record([Retried("a", task.token, error, clock.now())])
        history = await storage.history("a")

        expected = [1, *range(31 - (len(history) - 1), 31)]
        assert [attempt.number for attempt in history] == expected
        assert [attempt.error and attempt.error.message for attempt in history] == [
            f"failure {number}" for number in expected
        ]
        assert len(history) >= 10
        times = [attempt.finished_at for attempt in history]
        assert times == sorted(times)
        assert (await claim_one(storage)).attempts == 30

    @promise("Q6")
    async def test_the_history_stays_with_a_task_that_has_ended(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await storage.record([Retried("a", task.token, an_error("one"), clock.now())])
        await storage.reserve(1)
        await storage.mark_failed("a", an_error("two"), will_retry=False)

        errors = [attempt.error and attempt.error.message for attempt in await storage.history("a")]
        assert errors == ["one", "two"]
        assert await storage.history("unknown") == []

    async def test_an_invalid_id_is_refused(self, storage: BaseStorage) -> None:
        for bad in ("", "../x", "a/b", 7, None):
            with pytest.raises(InvalidTask):
                await storage.get_task(bad)  # type: ignore[arg-type]
            with pytest.raises(InvalidTask):
                await storage.get_result(bad)  # type: ignore[arg-type]
            with pytest.raises(InvalidTask):
                await storage.history(bad)  # type: ignore[arg-type]

    @promise("Q7")
    @pytest.mark.parametrize("filters", FILTERS.values(), ids=list(FILTERS))
    async def test_scans_cover_all_tasks_once_newest_first(
        self, storage: BaseStorage, clock: ManualClock, filters: dict[str, Any]
    ) -> None:
        await _fill_store_one_by_one(storage, clock)
        tasks = await storage.list_tasks(limit=1000)
        expected = [
            task.id
            for task in reversed(tasks)
            if all(getattr(task, name) == value for name, value in filters.items())
        ]

        assert len(tasks) == 30
        for size, most in ((1, 1000), (4, 3), (100, 7), (100, 1000)):
            assert await _scan_all(storage, size, most, **filters) == expected

    @promise("Q7")
    async def test_a_scan_continues_from_the_cursor_of_any_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await _fill_store_one_by_one(storage, clock)
        whole = await storage.scan_tasks(limit=100)
        rest = await storage.scan_tasks(limit=100, cursor=whole.cursors[11])

        assert ids(rest.tasks) == ids(whole.tasks)[12:]
        assert whole.cursor is None

    @promise("Q7")
    async def test_a_scan_stops_after_max_scanned_records_and_returns_a_cursor(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.enqueue(a_task(clock.new_id(), queue="rare"))
        for _ in range(20):
            await storage.enqueue(a_task(clock.new_id()))

        scan = await storage.scan_tasks(queue="rare", max_scanned=5)
        assert scan.tasks == ()
        assert scan.cursor is not None
        assert len(await _scan_all(storage, 10, 5, queue="rare")) == 1

    @promise("Q7")
    async def test_a_scan_starts_at_a_given_time(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        task_ids = []
        for _ in range(5):
            clock.advance(60)
            task_ids.append(clock.new_id())
            await storage.enqueue(a_task(task_ids[-1], created_at=clock.now()))

        scan = await storage.scan_tasks(until=clock.now() - timedelta(seconds=90))
        assert ids(scan.tasks) == [task_ids[2], task_ids[1], task_ids[0]]

    @promise("Q7")
    async def test_a_scan_orders_tasks_with_custom_ids_by_their_creation(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        task_ids = [clock.new_id(), "mine", "nightly-2026", ""]
        for number, task_id in enumerate(task_ids):
            clock.advance(60)
            task_ids[number] = task_id or clock.new_id()
            await storage.enqueue(a_task(task_ids[number], created_at=clock.now()))

        for size in (1, 3, 10):
            assert await _scan_all(storage, size, 1000) == task_ids[::-1]

    @promise("Q7")
    async def test_a_cursor_that_no_scan_returned_is_refused(self, storage: BaseStorage) -> None:
        for cursor in ("", "~", "-1", "9" * 30, "a~b~c"):
            with pytest.raises(InvalidValue, match="cursor"):
                await storage.scan_tasks(cursor=cursor)

    @promise("Q8")
    async def test_the_age_of_each_queue_is_the_age_of_its_oldest_due_task(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        later = clock.now() + timedelta(seconds=20)
        await storage.enqueue_many(
            [
                *some_tasks("ab", queue="busy"),
                a_task("c", queue="late", eta=later),
                a_task("d", queue="later", eta=clock.now() + timedelta(days=1)),
                a_task("e", queue="held", priority=9),
            ]
        )
        await claim_one(storage)
        clock.advance(30)
        await storage.enqueue(a_task("f", queue="busy", priority=5))
        stats = await storage.stats()

        assert stats.oldest_by_queue == {"busy": 30.0, "late": 10.0}
        assert stats.oldest_due_age == 30.0

    @promise("Q8")
    async def test_the_age_of_a_queue_does_not_depend_on_the_order_of_claims(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        # Both of the later tasks may be claimed first.
        first = a_task("a", ageing=60), a_task("b", queue="shared")
        await storage.enqueue_many(first)
        clock.advance(30)
        second = (
            a_task("c", ageing=60, priority=3),
            a_task("d", queue="shared", fair=FairShare(key="k")),
        )
        await storage.enqueue_many(second)
        clock.advance(5)

        assert (await storage.stats()).oldest_by_queue == {"default": 35.0, "shared": 35.0}
