"""What happens is found by comparing two reads of a storage."""

from __future__ import annotations

from datetime import timedelta

from omniq.models import BreakerRule, TaskStatus
from omniq.operations.event_tail import EventTail
from omniq.outcomes import Failed, Released, Retried, Succeeded
from omniq.testing.builders import a_result, a_task, an_error, some_tasks


async def names(tail: EventTail) -> list[tuple[str, str]]:
    return [(event.event, event.id) for event in await tail.poll()]


async def test_the_first_poll_reports_nothing_and_a_quiet_storage_neither(storage, worker):
    await worker()
    await storage.enqueue(a_task("old"))
    tail = EventTail(storage)

    assert await tail.poll() == []
    assert await tail.poll() == []


async def test_the_life_of_a_task_is_reported_as_it_happens(storage, worker, clock):
    other = await worker()
    tail = EventTail(storage)
    await tail.poll()

    await storage.enqueue(a_task("a", queue="mail"))
    assert await names(tail) == [("task.enqueued", "a")]
    clock.advance(1)
    (task,) = await other.reserve(1)
    (started,) = await tail.poll()
    assert (started.event, started.attempt, started.worker) == ("task.started", 1, other.owner)
    clock.advance(2)
    await other.record([Succeeded("a", task.token, a_result(task))])
    (ended,) = await tail.poll()
    assert (ended.event, ended.id, ended.queue) == ("task.succeeded", "a", "mail")
    assert await tail.poll() == []


async def test_what_happened_between_two_polls_is_reported_in_order(storage, worker, clock):
    other = await worker()
    tail = EventTail(storage)
    await tail.poll()

    # The clock of the program that enqueues is an hour ahead.
    await storage.enqueue(a_task("a", created_at=clock.now() + timedelta(hours=1)))
    clock.advance(1)
    (task,) = await other.reserve(1)
    clock.advance(1)
    await other.record([Failed("a", task.token, an_error())])

    found = await tail.poll()
    assert [event.event for event in found] == ["task.enqueued", "task.started", "task.failed"]
    assert found[1].attempt == 1
    assert found[2].error == an_error().error_type


async def test_events_of_several_tasks_are_in_the_order_of_time(storage, worker, clock):
    await storage.enqueue_many(some_tasks("ab"))
    other = await worker()
    tail = EventTail(storage)
    await tail.poll()
    first, second = [(await other.reserve(1))[0] for _ in range(2)]
    clock.advance(1)
    await other.record([Succeeded(second.id, second.token, a_result(second))])
    clock.advance(1)
    await other.record([Succeeded(first.id, first.token, a_result(first))])

    found = await tail.poll()
    assert {event.event for event in found[:2]} == {"task.started"}


async def test_a_retry_has_the_error_of_the_failed_attempt(storage, worker, clock):
    other = await worker()
    await storage.enqueue(a_task("a"))
    tail = EventTail(storage)
    await tail.poll()
    (task,) = await other.reserve(1)
    retry_at = clock.now().replace(microsecond=0)
    await other.record([Retried("a", task.token, an_error(), retry_at)])

    started, retried = await tail.poll()
    assert (started.event, started.attempt) == ("task.started", 1)
    assert (retried.event, retried.attempt, retried.error) == (
        "task.retried",
        1,
        an_error().error_type,
    )


async def test_a_released_and_a_cancelled_task_are_reported(storage, worker):
    other = await worker()
    await storage.enqueue_many(some_tasks("ab"))
    tail = EventTail(storage)
    await tail.poll()
    (task,) = await other.reserve(1)
    await tail.poll()
    await other.record([Released(task.id, task.token)])
    await storage.cancel("b")

    assert set(await names(tail)) == {("task.released", "a"), ("task.cancelled", "b")}


async def test_a_changed_task_is_reported(storage):
    await storage.enqueue(a_task("a"))
    tail = EventTail(storage)
    await tail.poll()
    await storage.change_task("a", priority=7)

    assert await names(tail) == [("task.changed", "a")]


async def test_a_task_that_waits_for_its_retry_can_be_changed(storage, worker, clock):
    other = await worker()
    await storage.enqueue(a_task("a"))
    (task,) = await other.reserve(1)
    await other.record([Retried("a", task.token, an_error(), clock.now() + timedelta(hours=1))])
    tail = EventTail(storage)
    await tail.poll()
    await storage.change_task("a", priority=7)

    assert await names(tail) == [("task.changed", "a")]


async def test_a_retried_dead_letter_is_reported(storage, worker):
    other = await worker()
    await storage.enqueue(a_task("a"))
    (task,) = await other.reserve(1)
    await other.record([Failed("a", task.token, an_error())])
    tail = EventTail(storage)
    await tail.poll()
    await storage.retry_dead("a")

    assert await names(tail) == [("dead.retried", "a")]


async def test_a_task_without_a_record_is_reported_once(storage, worker):
    other = await worker()
    await storage.enqueue(a_task("a", result_ttl=0))
    (task,) = await other.reserve(1)
    tail = EventTail(storage)
    await tail.poll()
    await other.record([Succeeded("a", task.token, a_result(task))])

    (event,) = await tail.poll()
    assert event.event in ("task.deleted", "task.succeeded")
    assert await tail.poll() == []


async def test_old_tasks_that_come_into_view_are_not_news(storage, worker, clock):
    other = await worker()
    old = clock.now() - timedelta(days=1)
    await storage.enqueue_many([a_task(f"t-{number:03}", created_at=old) for number in range(400)])
    for task in await other.reserve(400):
        await other.record([Succeeded(task.id, task.token, a_result(task))])
    tail = EventTail(storage)
    await tail.poll()
    for number in range(150, 400):
        await storage.delete_task(f"t-{number:03}")

    assert await tail.poll() == []


async def test_a_running_task_is_followed_to_its_end_however_old_it_is(storage, worker):
    other = await worker()
    await storage.enqueue(a_task("old"))
    tail = EventTail(storage)
    await tail.poll()
    (task,) = await other.reserve(1)
    await storage.enqueue_many(some_tasks(f"new-{number:03}" for number in range(300)))
    first = await names(tail)
    assert ("task.started", "old") in first
    assert ("events.missed", "") in first
    assert len(first) == 202
    await other.record([Succeeded("old", task.token, a_result(task))])

    assert await names(tail) == [("task.succeeded", "old")]


async def test_workers_queues_and_breakers_are_reported(storage, worker, clock):
    tail = EventTail(storage)
    await tail.poll()
    other = await worker(concurrency=2)
    await storage.pause_queue("mail")
    rule = BreakerRule(name="smtp", max_failures=1)
    await storage.enqueue(a_task("a", breakers=(rule,)))
    (task,) = await other.reserve(1)
    await other.record([Failed("a", task.token, an_error())])

    found = await names(tail)
    assert ("worker.started", other.owner) in found
    assert ("queue.paused", "mail") in found
    assert ("breaker.opened", "smtp") in found

    await storage.resume_queue("mail")
    await storage.pause_worker(other.owner)
    await storage.close_breaker("smtp")
    found = await names(tail)
    assert ("queue.resumed", "mail") in found
    assert ("worker.paused", other.owner) in found
    assert ("breaker.closed", "smtp") in found

    await other.close()
    assert ("worker.stopped", other.owner) in await names(tail)


async def test_a_filter_reports_tasks_of_one_queue_only(storage, worker):
    tail = EventTail(storage, queue="mail")
    await tail.poll()
    await worker()
    await storage.enqueue_many([a_task("a", queue="mail"), a_task("b")])

    assert await names(tail) == [("task.enqueued", "a")]
    (found,) = await storage.list_tasks(status=TaskStatus.PENDING, queue="mail")
    assert found.id == "a"
