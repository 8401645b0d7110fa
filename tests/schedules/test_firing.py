"""When schedules fire, and the policies for missed and overlapping times, with a manual clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from omniq import AsyncTaskQueue, TaskStatus
from omniq.errors import StorageError
from omniq.events import Dispatcher, Event, ScheduleFired, ScheduleMissed, WorkerProblem
from omniq.models import Schedule, Task
from omniq.scheduling.due_times import due, task_at, task_id_at
from omniq.storage.memory import MemoryStorage
from omniq.testing.builders import a_result
from omniq.testing.clock import ManualClock
from omniq.worker.schedule_loop import ScheduleLoop
from tests.schedules import sample_tasks

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
async def queue(clock: ManualClock) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        await queue.storage.renew(lease=86_400_000)
        yield queue


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def scheduling(queue: AsyncTaskQueue, emitted: list[Event]) -> ScheduleLoop:
    events = Dispatcher()
    events.subscribe(emitted.append)
    return ScheduleLoop(queue.storage, events, 1.0)


async def tasks(queue: AsyncTaskQueue) -> list[Task]:
    return await queue.list_tasks(limit=10_000)


async def fired(queue: AsyncTaskQueue) -> list[datetime]:
    """The nominal times that have a task, in order."""
    return sorted(
        datetime.fromisoformat(task.metadata["scheduled_for"]) for task in await tasks(queue)
    )


async def run_one(queue: AsyncTaskQueue) -> Task:
    """Claim the next task and have it succeed."""
    (task,) = await queue.storage.reserve(1)
    await queue.storage.mark_done(task.id, a_result(task))
    return task


async def test_a_month_of_schedules_fires_each_nominal_time_once(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("hourly", sample_tasks.report, cron="0 * * * *")
    await queue.schedules.add("rhythm", sample_tasks.report, interval=HOUR * 6, start=NOON)
    await queue.schedules.add(
        "nightly", sample_tasks.report, cron="30 2 * * *", tz="America/New_York"
    )
    for _ in range(30 * 24 * 4):
        clock.advance(MINUTE * 15)
        await scheduling.fire_due()

    count = Counter(task.schedule_id for task in await tasks(queue))
    assert count == {"hourly": 30 * 24, "rhythm": 30 * 4, "nightly": 30}
    assert max(Counter(task.id for task in await tasks(queue)).values()) == 1


async def test_a_task_names_its_schedule_and_its_nominal_time(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop, emitted: list[Event]
) -> None:
    await queue.schedules.add("s", sample_tasks.with_options, interval=60)
    clock.advance(60.5)
    await scheduling.fire_due()
    (task,) = await tasks(queue)

    assert (task.id, task.schedule_id) == ("s.20260101T120100Z", "s")
    assert (task.queue, task.priority) == ("reports", 3)
    assert task.metadata == {"team": "blue", "scheduled_for": "2026-01-01T12:01:00+00:00"}
    assert task.eta == task.created_at == clock.now()
    assert task.expires == clock.now() + MINUTE
    firing = next(event for event in emitted if isinstance(event, ScheduleFired))
    assert (firing.schedule_id, firing.id, firing.late) == ("s", task.id, 0.5)


@pytest.mark.parametrize("missed", ["once", "all", "skip"])
async def test_a_worker_whose_clock_is_ahead_of_the_store_fires_and_skips_nothing_early(
    queue: AsyncTaskQueue, clock: ManualClock, emitted: list[Event], missed: Any
) -> None:
    await queue.schedules.add("s", sample_tasks.report, interval=HOUR, missed=missed)
    before = await queue.schedules.get("s")
    assert isinstance(queue.storage, MemoryStorage)
    ahead = queue.storage.another()
    ahead._clock = ManualClock(NOON + HOUR * 3.5)
    events = Dispatcher()
    events.subscribe(emitted.append)
    async with ahead:
        loop = ScheduleLoop(ahead, events, 0.5)
        assert await loop.fire_due() == 0.5

    assert await tasks(queue) == []
    assert await queue.schedules.get("s") == before
    assert emitted == []
    clock.advance(HOUR)
    await ScheduleLoop(queue.storage, events, 0.5).fire_due()
    assert await fired(queue) == [NOON + HOUR]


async def test_the_schedule_loop_returns_the_time_until_the_next_nominal_time(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    assert await scheduling.fire_due() == 1.0
    await queue.schedules.add("s", sample_tasks.report, interval=0.25)

    assert await scheduling.fire_due() == 0.25


# Missed times


MISSED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "once": ({"missed": "once"}, [16]),
    "default": ({}, [16]),
    "all": ({"missed": "all"}, [13, 14, 15, 16]),
    "capped": ({"missed": "all", "max_missed": 2}, [15, 16]),
    "skip": ({"missed": "skip"}, []),
}


@pytest.mark.parametrize(
    "timing", [{"cron": "0 * * * *"}, {"interval": HOUR}], ids=["cron", "interval"]
)
@pytest.mark.parametrize(("policy", "hours"), MISSED.values(), ids=list(MISSED))
@pytest.mark.fault("F86")
async def test_missed_times_are_handled_by_the_policy(
    queue: AsyncTaskQueue,
    clock: ManualClock,
    scheduling: ScheduleLoop,
    emitted: list[Event],
    timing: Any,
    policy: Any,
    hours: list[int],
) -> None:
    await queue.schedules.add("s", sample_tasks.report, **timing, **policy)
    clock.advance(HOUR * 4 + MINUTE * 30)
    await scheduling.fire_due()

    assert [at.hour for at in await fired(queue)] == hours
    (schedule,) = await queue.schedules.list()
    assert schedule.next_at == NOON + HOUR * 5
    missed = [event for event in emitted if isinstance(event, ScheduleMissed)]
    assert bool(missed) == (len(hours) < 4)


async def test_skip_runs_a_time_that_is_less_than_a_minute_late(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", missed="skip")
    clock.advance(HOUR * 2 + timedelta(seconds=59))
    await scheduling.fire_due()

    assert await fired(queue) == [NOON + HOUR * 2]


@pytest.mark.fault("F86")
async def test_a_month_of_missed_seconds_is_caught_up_in_one_step(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add(
        "s", sample_tasks.report, cron="* * * * * *", missed="all", max_missed=3
    )
    clock.advance(timedelta(days=30))
    await scheduling.fire_due()

    assert [(clock.now() - at).total_seconds() for at in await fired(queue)] == [2, 1, 0]


def test_very_many_missed_times_are_searched_once() -> None:
    """A search for each of 30,000 times would take an hour."""
    schedule = Schedule(
        id="s",
        task=Task(func_path="tests.f"),
        cron="* * * * *",
        missed="all",
        max_missed=30_000,
        next_at=NOON + MINUTE,
    )
    now, missed, nominal = NOON + MINUTE * 30_000, deque[datetime](), []
    while (firing := due(schedule, now, missed)) is not None:
        nominal.append(firing.nominal)
        schedule = firing.advanced
        if len(nominal) == 100:
            # A time that becomes due meanwhile is not left out.
            now += MINUTE

    assert nominal == [NOON + MINUTE * step for step in range(1, 30_002)]


async def test_a_schedule_that_changes_while_it_catches_up_has_its_new_times(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    storage, read = queue.storage, queue.storage.get_schedule

    async def change_and_read(schedule_id: str) -> Schedule | None:
        storage.get_schedule = read  # type: ignore[method-assign]
        stored = await read(schedule_id)
        assert stored is not None
        assert stored.next_at == NOON + HOUR * 2
        await storage.put_schedule(replace(stored, cron="30 * * * *"))
        return await read(schedule_id)

    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", missed="all")
    clock.advance(HOUR * 3)
    storage.get_schedule = change_and_read  # type: ignore[method-assign]
    await scheduling.fire_due()

    assert await fired(queue) == [NOON + HOUR, NOON + HOUR * 2.5]


@pytest.mark.fault("F24")
async def test_a_clock_that_is_set_back_enqueues_no_time_twice(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", missed="all")
    clock.advance(HOUR * 3)
    await scheduling.fire_due()
    clock.jump(-HOUR * 2)
    for _ in range(4):
        clock.advance(HOUR)
        await scheduling.fire_due()
        await queue.schedules.pause("s")
        await queue.schedules.resume("s")

    assert await fired(queue) == [NOON + HOUR * step for step in range(1, 6)]


@pytest.mark.fault("F24")
async def test_a_clock_that_is_set_forward_enqueues_no_burst_of_tasks(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="* * * * *")
    clock.jump(timedelta(days=1))
    await scheduling.fire_due()

    assert await fired(queue) == [NOON + timedelta(days=1)]


# Overlap


async def test_skip_enqueues_no_task_while_the_previous_run_has_not_ended(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", overlap="skip")
    for _ in range(3):
        clock.advance(HOUR)
        await scheduling.fire_due()
    done = await run_one(queue)
    clock.advance(HOUR)
    await scheduling.fire_due()

    assert await fired(queue) == [NOON + HOUR, NOON + HOUR * 4]
    assert done.id == task_id_at("s", NOON + HOUR)


async def test_queue_runs_overlapping_tasks_one_after_the_other(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", overlap="queue")
    for _ in range(3):
        clock.advance(HOUR)
        await scheduling.fire_due()
    (first,) = await queue.storage.reserve(5)
    none = await queue.storage.reserve(5)
    await queue.storage.mark_done(first.id, a_result(first))
    (second,) = await queue.storage.reserve(5)

    assert none == []
    assert [first.id, second.id] == [task_id_at("s", NOON + HOUR * hour) for hour in (1, 2)]


async def test_cancel_old_cancels_the_previous_run_and_waits_for_its_end(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", overlap="cancel_old")
    clock.advance(HOUR)
    await scheduling.fire_due()
    (running,) = await queue.storage.reserve(1)
    clock.advance(HOUR)
    await scheduling.fire_due()
    told_to_stop = await queue.get_task(running.id)
    waiting = await queue.storage.reserve(1)
    clock.advance(HOUR)
    await scheduling.fire_due()

    assert told_to_stop is not None
    assert told_to_stop.cancel_requested
    assert waiting == []
    status = {task.id: task.status for task in await tasks(queue)}
    assert status == {
        running.id: TaskStatus.RUNNING,
        task_id_at("s", NOON + HOUR * 2): TaskStatus.CANCELLED,
        task_id_at("s", NOON + HOUR * 3): TaskStatus.PENDING,
    }


async def test_allow_enqueues_a_task_while_the_previous_one_runs(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *")
    for _ in range(3):
        clock.advance(HOUR)
        await scheduling.fire_due()

    assert len(await queue.storage.reserve(5)) == 3


# Jitter, start and end, one time alone


async def test_jitter_is_within_its_bounds_and_the_same_for_the_same_time(
    queue: AsyncTaskQueue,
) -> None:
    schedule = await queue.schedules.add("s", sample_tasks.report, interval=60, jitter=10)
    times = [NOON + MINUTE * step for step in range(200)]
    etas = [task_at(schedule, at, at).eta or at for at in times]
    delays = [(eta - at).total_seconds() for eta, at in zip(etas, times, strict=True)]

    assert [task_at(schedule, at, at).eta for at in times] == etas
    assert 0 <= min(delays) < 1
    assert 9 < max(delays) < 10
    assert len(set(delays)) == 200


async def test_nothing_is_fired_before_the_start_or_after_the_end(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    limits = {"start": NOON + HOUR * 3, "end": NOON + HOUR * 5}
    await queue.schedules.add("c", sample_tasks.report, cron="0 * * * *", **limits)  # type: ignore[call-overload]
    await queue.schedules.add("i", sample_tasks.report, interval=HOUR, **limits)  # type: ignore[call-overload]
    for _ in range(8):
        clock.advance(HOUR)
        await scheduling.fire_due()

    assert await fired(queue) == sorted([NOON + HOUR * hour for hour in (3, 4, 5)] * 2)
    assert [schedule.next_at for schedule in await queue.schedules.list()] == [None, None]


async def test_a_schedule_with_a_single_time_fires_once(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("later", sample_tasks.report, at=NOON + HOUR)
    await queue.schedules.add("past", sample_tasks.report, at=NOON - HOUR)
    for _ in range(3):
        clock.advance(MINUTE * 45)
        await scheduling.fire_due()
        await queue.schedules.add("later", sample_tasks.report, at=NOON + HOUR)

    assert await fired(queue) == [NOON - HOUR, NOON + HOUR]


async def test_a_paused_schedule_does_not_fire_and_skips_the_times_of_the_pause(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", missed="all")
    await queue.schedules.pause("s")
    clock.advance(HOUR * 5)
    await scheduling.fire_due()
    while_paused = await fired(queue)
    resumed = await queue.schedules.resume("s")
    clock.advance(HOUR)
    await scheduling.fire_due()

    assert while_paused == []
    assert (resumed.paused, resumed.next_at) == (False, NOON + HOUR * 6)
    assert await fired(queue) == [NOON + HOUR * 6]


# When something is wrong


async def test_a_schedule_that_cannot_fire_delays_no_other_and_is_reported_once(
    queue: AsyncTaskQueue, clock: ManualClock, scheduling: ScheduleLoop, emitted: list[Event]
) -> None:
    await queue.schedules.add("good", sample_tasks.report, cron="0 * * * *")
    broken = await queue.schedules.add("bad", sample_tasks.report, cron="0 * * * *")
    # As read by a machine that knows fewer time zones than the one that stored it.
    await queue.storage._engine.put_schedule(
        Schedule(
            id="bad", task=broken.task, cron="0 * * * *", tz="Mars/Olympus", next_at=broken.next_at
        )
    )
    for _ in range(3):
        clock.advance(HOUR)
        await scheduling.fire_due()

    assert await fired(queue) == [NOON + HOUR * hour for hour in (1, 2, 3)]
    failures = [event for event in emitted if isinstance(event, WorkerProblem)]
    assert [failure.activity for failure in failures] == ["schedule bad"]
    assert "Mars/Olympus" in failures[0].error


async def test_an_unreachable_storage_is_polled_with_growing_pauses(
    clock: ManualClock, emitted: list[Event]
) -> None:
    class Away(MemoryStorage):
        async def list_schedules(self) -> list[Schedule]:
            raise StorageError("away")

    events = Dispatcher()
    events.subscribe(emitted.append)
    async with Away(clock=clock) as storage:
        scheduling = ScheduleLoop(storage, events, 1.0)
        pauses = [await scheduling.fire_due() for _ in range(5)]

    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert sum(isinstance(event, WorkerProblem) for event in emitted) == 5


@pytest.mark.parametrize("length", [1, 100, 101, 128])
def test_the_task_id_of_a_nominal_time_is_valid_for_every_length_of_schedule_id(
    length: int,
) -> None:
    at = NOON + timedelta(microseconds=5)
    one, other = task_id_at("x" * length, at), task_id_at("x" * (length - 1) + "y", at)

    assert one != other
    assert max(len(one), len(other)) <= 128
    assert one.endswith(".20260101T120000.000005Z")
