"""Bulk actions: each item is a separate step, and progress is reported."""

from __future__ import annotations

from datetime import timedelta

from omniq.operations import bulk_actions
from omniq.outcomes import Failed, Succeeded
from omniq.testing.builders import a_result, a_task, an_error, some_tasks


async def kill(other, *, count: int) -> None:
    for task in await other.reserve(count):
        await other.record([Failed(task.id, task.token, an_error())])


async def test_retrying_all_dead_letters_reports_progress(storage, worker):
    other = await worker(concurrency=50)
    await storage.enqueue_many(some_tasks(f"t{number}" for number in range(50)))
    await kill(other, count=50)
    reported: list[tuple[int, int]] = []

    ids = await bulk_actions.dead_ids(storage)
    done = await bulk_actions.retry_dead(
        storage, ids, on_progress=lambda n, of: reported.append((n, of))
    )

    assert (done.done, done.refused) == (50, {})
    assert reported == [(32, 50), (50, 50)]
    assert (await storage.stats()).dead == 0


async def test_a_dead_letter_that_cannot_be_retried_stays_and_the_reason_is_reported(
    storage, worker
):
    other = await worker(concurrency=2)
    await storage.enqueue_many([a_task("a", unique="k"), a_task("b")])
    await kill(other, count=2)
    await storage.enqueue(a_task("c", unique="k"))

    done = await bulk_actions.retry_dead(storage, ["a", "b", "missing"])

    assert done.done == 1
    assert "c" in done.refused["a"]
    assert done.refused["missing"] == "not a dead letter"
    assert await storage.get_dead("a") is not None


async def test_cancelling_reports_the_reason_of_a_refusal(storage, worker):
    other = await worker()
    await storage.enqueue_many(some_tasks("ab"))
    await kill(other, count=1)

    done = await bulk_actions.cancel_tasks(storage, ["a", "b", "missing"])

    assert done.done == 1
    assert done.refused == {"a": "ended already: failed", "missing": "no such task on record"}


async def test_a_purge_deletes_old_tasks_only(storage, worker, clock):
    other = await worker(lease=10_000)
    for number in range(10):
        await storage.enqueue(a_task(f"t{number}", created_at=clock.now()))
        (task,) = await other.reserve(1)
        await other.record([Succeeded(task.id, task.token, a_result(task))])
        clock.advance(60)
    await storage.enqueue(a_task("waiting", created_at=clock.now()))
    reported: list[tuple[int, int]] = []

    count = await bulk_actions.purge(
        storage,
        clock.now() - timedelta(minutes=5),
        on_progress=lambda done, total: reported.append((done, total)),
    )

    assert count == 5
    assert reported[-1][0] == reported[-1][1]
    assert [task.id async for task in bulk_actions.all_tasks(storage)] == [
        *(f"t{number}" for number in range(5, 10)),
        "waiting",
    ]


async def test_purging_dead_letters_does_not_delete_results(storage, worker, clock):
    other = await worker(lease=10_000)
    await storage.enqueue(a_task("a"))
    await kill(other, count=1)
    clock.advance(60)

    assert await bulk_actions.purge(storage, clock.now(), dead=True) == 1
    assert await storage.get_task("a") is not None
    assert await bulk_actions.purge(storage, clock.now(), dead=True) == 0


async def test_deleting_removes_finished_tasks_with_their_dead_letters_and_reports_refusals(
    storage, worker
):
    other = await worker(concurrency=3)
    await storage.enqueue_many(some_tasks("abc"))
    await kill(other, count=1)
    (task,) = await other.reserve(1)
    await other.record([Succeeded(task.id, task.token, a_result(task))])

    done = await bulk_actions.delete_tasks(storage, ["a", "b", "c", "missing"])

    assert done.done == 2
    assert done.refused == {"c": "has not ended: pending", "missing": "no such task on record"}
    assert [task.id async for task in bulk_actions.all_tasks(storage)] == ["c"]
    assert await storage.list_dead() == []


async def test_a_dead_letter_whose_record_has_expired_can_be_deleted(storage, worker):
    other = await worker()
    await storage.enqueue(a_task("a", result_ttl=0))
    await kill(other, count=1)

    assert (await bulk_actions.delete_tasks(storage, ["a"])).done == 1
    assert await storage.list_dead() == []
