"""`queue.schedules`: add, read, change, trigger, backfill and declare, async and blocking."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import msgspec
import pytest

from omniq import AsyncTaskQueue, InvalidTask, InvalidValue, ScheduleNotFound, TaskQueue, task
from omniq.events import Dispatcher
from omniq.models import Schedule
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.worker.schedule_loop import ScheduleLoop
from tests.schedules import sample_tasks

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
HERE = "tests.schedules.sample_tasks"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
async def queue(clock: ManualClock) -> AsyncIterator[AsyncTaskQueue]:
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        yield queue


async def fire(queue: AsyncTaskQueue) -> None:
    await ScheduleLoop(queue.storage, Dispatcher(), 1.0).fire_due()


async def names(queue: AsyncTaskQueue) -> list[str]:
    return [task.id for task in await queue.list_tasks(limit=1000)]


# Add and replace


async def test_a_schedule_is_stored_with_its_first_time(queue: AsyncTaskQueue) -> None:
    await queue.schedules.add(
        "nightly",
        sample_tasks.report,
        args=("us",),
        kwargs={"full": True},
        cron="0 3 * * *",
        tz="Europe/Berlin",
        queue="reports",
        timeout=MINUTE,
    )
    stored = await queue.schedules.get("nightly")

    assert stored is not None
    assert stored.next_at == datetime(2026, 1, 2, 2, tzinfo=UTC)
    assert (stored.task.args, stored.task.kwargs) == (("us",), {"full": True})
    assert (stored.task.queue, stored.task.timeout) == ("reports", 60.0)
    assert [schedule.id for schedule in await queue.schedules.list()] == ["nightly"]


async def test_an_interval_starts_one_interval_from_now_or_at_its_start(
    queue: AsyncTaskQueue,
) -> None:
    first = await queue.schedules.add("a", sample_tasks.report, interval=90)
    second = await queue.schedules.add("b", sample_tasks.report, interval=90, start=NOON - HOUR)

    assert first.next_at == NOON + timedelta(seconds=90)
    assert second.next_at == NOON + timedelta(seconds=90)
    assert await queue.schedules.upcoming("a", 3) == [
        NOON + timedelta(seconds=90 * step) for step in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    "timing", [{"cron": "0 * * * *"}, {"interval": HOUR}], ids=["cron", "interval"]
)
async def test_a_replaced_schedule_keeps_its_next_time(
    queue: AsyncTaskQueue, clock: ManualClock, timing: Any
) -> None:
    await queue.schedules.add("s", sample_tasks.report, **timing)
    clock.advance(HOUR * 1.5)
    await fire(queue)
    clock.advance(HOUR)
    replaced = await queue.schedules.add("s", sample_tasks.report, args=("us",), **timing)

    assert replaced.last_at == NOON + HOUR
    # Still due: a changed argument does not lose the time.
    assert replaced.next_at == NOON + HOUR * 2
    await fire(queue)
    assert [task.args for task in await queue.list_tasks()] == [(), ("us",)]


async def test_a_changed_timing_counts_from_now(queue: AsyncTaskQueue, clock: ManualClock) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *")
    await queue.schedules.pause("s")
    clock.advance(HOUR * 3.5)
    replaced = await queue.schedules.add("s", sample_tasks.report, cron="10 * * * *")

    assert replaced.next_at == NOON + HOUR * 4 + MINUTE * 10
    assert replaced.paused


async def test_adding_the_same_again_changes_nothing(queue: AsyncTaskQueue) -> None:
    await queue.schedules.add("s", sample_tasks.report, interval=60)
    first = await queue.schedules.get("s")
    await queue.schedules.add("s", sample_tasks.report, interval=60)

    assert await queue.schedules.get("s") == first


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "one of cron, interval and at"),
    ({"cron": "* * * * *", "interval": 5}, "one of cron, interval and at"),
    ({"interval": 5, "at": NOON}, "one of cron, interval and at"),
    ({"cron": "99 * * * *"}, "minute '99'"),
    ({"cron": "0 0 30 2 *"}, "names no date"),
    ({"cron": "* * * * *", "tz": "Nowhere/Land"}, "no such time zone"),
    ({"interval": 5, "tz": "UTC"}, "only a cron expression"),
    ({"interval": 0}, "interval"),
    ({"interval": -1}, "interval"),
    ({"interval": float("nan")}, "interval"),
    ({"interval": float("inf")}, "interval"),
    ({"interval": 0.001}, "at least 0.01"),
    ({"at": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001 - the point of the test
    ({"interval": 5, "start": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001
    ({"interval": 5, "start": NOON, "end": NOON - HOUR}, "end is before its start"),
    ({"interval": 5, "end": NOON}, "no time in the future"),
    ({"interval": 5, "missed": "often"}, "missed 'often'"),
    ({"interval": 5, "overlap": "maybe"}, "overlap 'maybe'"),
    ({"interval": 5, "max_missed": 0}, "max_missed"),
    ({"interval": 5, "max_missed": 100_001}, "max_missed 100001: at most 100000"),
    ({"interval": 5, "jitter": -1}, "jitter"),
    ({"interval": 5, "expires": NOON}, "after a duration"),
    ({"interval": 5, "colour": "blue"}, "no option 'colour'"),
    ({"interval": 5, "delay": 5}, r"delay is an option of options\(…\), not of schedules\.add"),
    (
        {"interval": 5, "task_id": "a"},
        r"task_id is an option of options\(…\), not of schedules\.add",
    ),
    ({"interval": 5, "ovrlap": "skip"}, r"^schedules\.add\(…\): .* did you mean overlap"),
    ({"interval": 5, "timeout": 0}, "timeout"),
    ({"interval": 5, "args": ("a", "b", "c")}, "too many positional arguments"),
    ({"interval": 5, "kwargs": {"colour": "blue"}}, "unexpected keyword argument 'colour'"),
    ({"interval": 5, "args": (object(),)}, "object"),
]


@pytest.mark.parametrize(("options", "complaint"), BAD, ids=[str(i) for i in range(len(BAD))])
async def test_a_schedule_that_cannot_fire_is_refused_at_once(
    queue: AsyncTaskQueue, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        await queue.schedules.add("s", sample_tasks.report, **options)

    assert await queue.schedules.list() == []


async def test_a_stored_schedule_with_a_larger_max_missed_still_fires(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.report, interval=60)
    stored = await queue.schedules.get("s")
    assert stored is not None
    earlier = msgspec.structs.replace(stored, max_missed=10**9)
    # Without the check of what is new, as earlier versions stored it.
    await queue.storage._engine.put_schedule(earlier)
    clock.advance(60)
    await fire(queue)

    (listed,) = await queue.schedules.list()
    assert listed.max_missed == 100_000
    assert len(await names(queue)) == 1


async def test_an_invalid_schedule_id_is_refused(queue: AsyncTaskQueue) -> None:
    with pytest.raises(InvalidValue, match="schedule id"):
        await queue.schedules.add("../up", sample_tasks.report, interval=5)


async def test_a_call_that_lacks_an_argument_is_refused(queue: AsyncTaskQueue) -> None:
    with pytest.raises(InvalidTask, match="missing a required argument: 'region'"):
        await queue.schedules.add("s", sample_tasks.needs, interval=5)
    await queue.schedules.add("path", "other.service.func", args=(1, 2), interval=5)
    await queue.schedules.add("context", sample_tasks.with_options, interval=5)


async def test_the_timing_of_the_schedule_replaces_the_timing_of_the_decorator(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.nightly, interval=60)
    clock.advance(60)
    await fire(queue)

    (made,) = await queue.list_tasks()
    assert (made.cron, made.tz, made.interval, made.queue) == (None, None, None, "night")


# Pause, trigger, delete, backfill


async def test_pausing_and_resuming_are_safe_to_repeat(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.report, interval=60)
    for _ in range(2):
        assert (await queue.schedules.pause("s")).paused
    for _ in range(2):
        assert not (await queue.schedules.resume("s")).paused
    clock.advance(60)
    await fire(queue)

    assert await names(queue) == ["s.20260101T120100Z"]


async def test_a_change_does_not_undo_a_firing_in_between(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.report, interval=60)
    clock.advance(60)
    storage = queue.storage
    read = storage.get_schedule

    async def read_and_be_overtaken(schedule_id: str) -> Schedule | None:
        storage.get_schedule = read  # type: ignore[method-assign]
        schedule = await read(schedule_id)
        await fire(queue)
        return schedule

    storage.get_schedule = read_and_be_overtaken  # type: ignore[method-assign]
    paused = await queue.schedules.pause("s")

    assert paused.paused
    assert paused.last_at == NOON + MINUTE


async def test_trigger_runs_the_task_now_and_changes_no_time(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.report, args=("us",), interval=60, expires=30)
    await queue.schedules.pause("s")
    before = await queue.schedules.get("s")
    handle = await queue.schedules.trigger("s")
    made = await queue.get_task(handle.id)

    assert made is not None
    assert (made.schedule_id, made.args, made.eta) == ("s", ("us",), clock.now())
    assert made.expires == clock.now() + timedelta(seconds=30)
    assert (await queue.schedules.trigger("s")).id != handle.id
    assert await queue.schedules.get("s") == before


async def test_backfill_enqueues_each_time_of_a_window_once(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", overlap="skip")
    clock.advance(HOUR)
    await fire(queue)
    window = (NOON - HOUR * 2, NOON + HOUR * 2)
    handles = await queue.schedules.backfill("s", *window)
    again = await queue.schedules.backfill("s", *window)
    clock.advance(HOUR)
    await fire(queue)

    assert [handle.id[-7:-1] for handle in handles] == ["100000", "110000", "120000", "140000"]
    assert again == []
    assert len(await names(queue)) == 5


async def test_a_backfill_that_is_too_long_is_refused(queue: AsyncTaskQueue) -> None:
    await queue.schedules.add("s", sample_tasks.report, cron="* * * * * *")
    with pytest.raises(InvalidValue, match="in parts"):
        await queue.schedules.backfill("s", NOON - timedelta(days=1), NOON)

    assert await names(queue) == []


async def test_upcoming_returns_the_next_times(queue: AsyncTaskQueue) -> None:
    end = NOON + HOUR * 3
    await queue.schedules.add("s", sample_tasks.report, cron="0 * * * *", end=end)
    await queue.schedules.add("once", sample_tasks.report, at=end)

    expected = [NOON + HOUR * hour for hour in (1, 2, 3)]
    assert await queue.schedules.upcoming("s", 10) == expected
    assert await queue.schedules.upcoming("s", 2) == expected[:2]
    assert await queue.schedules.upcoming("s", 0) == []
    assert await queue.schedules.upcoming("once") == [end]
    await queue.schedules.pause("s")
    assert await queue.schedules.upcoming("s", 1) == expected[:1]


async def test_deleting_a_schedule_does_not_delete_its_tasks(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.add("s", sample_tasks.report, interval=60)
    clock.advance(60)
    await fire(queue)

    assert [await queue.schedules.delete("s"), await queue.schedules.delete("s")] == [True, False]
    assert await queue.schedules.get("s") is None
    assert len(await names(queue)) == 1


async def test_changing_an_unknown_schedule_raises(queue: AsyncTaskQueue) -> None:
    schedules = queue.schedules
    for call in (schedules.pause, schedules.resume, schedules.trigger, schedules.upcoming):
        with pytest.raises(ScheduleNotFound, match="ghost"):
            await call("ghost")
    with pytest.raises(ScheduleNotFound):
        await schedules.backfill("ghost", NOON, NOON)


# Schedules that stand in the code


async def test_a_module_declares_the_schedules_of_its_functions(queue: AsyncTaskQueue) -> None:
    await queue.schedules.declare(sample_tasks)
    nightly, minutely = sorted(await queue.schedules.list(), key=lambda one: one.cron is None)

    assert (nightly.id, nightly.cron, nightly.tz) == (
        f"{HERE}.nightly",
        "0 3 * * *",
        "Europe/Berlin",
    )
    assert (nightly.task.func_path, nightly.task.queue) == (f"{HERE}.nightly", "night")
    # On the minute, so that all who declare it agree.
    assert (minutely.interval, minutely.next_at) == (60.0, NOON + MINUTE)
    assert nightly.declared
    assert minutely.declared


async def test_declaring_again_keeps_the_next_time_and_the_pause(
    queue: AsyncTaskQueue, clock: ManualClock
) -> None:
    await queue.schedules.declare(sample_tasks)
    await queue.schedules.pause(f"{HERE}.nightly")
    before = await queue.schedules.list()
    clock.advance(timedelta(days=3))
    await queue.schedules.declare(sample_tasks)

    assert await queue.schedules.list() == before


@pytest.fixture
def code() -> Any:
    """A module that can be rewritten, as between two deployments."""
    module = ModuleType("code_of_today")
    sys.modules[module.__name__] = module

    def write(**functions: dict[str, Any]) -> ModuleType:
        for name in [name for name in vars(module) if not name.startswith("__")]:
            delattr(module, name)
        for name, options in functions.items():

            def body() -> None: ...

            body.__module__, body.__qualname__ = module.__name__, name
            body.__name__ = name
            setattr(module, name, task(**options)(body))
        return module

    yield write
    del sys.modules[module.__name__]


async def test_declare_updates_changed_schedules_and_deletes_removed_ones(
    queue: AsyncTaskQueue, code: Any
) -> None:
    await queue.schedules.declare(code(a={"cron": "0 * * * *"}, b={"cron": "0 * * * *"}))
    await queue.schedules.add("mine", "code_of_today.gone", cron="0 * * * *")
    await queue.schedules.declare(code(a={"cron": "30 * * * *", "priority": 2}))
    mine, declared = sorted(await queue.schedules.list(), key=lambda one: one.declared)

    assert mine.id == "mine"
    assert (declared.id, declared.cron, declared.task.priority) == (
        "code_of_today.a",
        "30 * * * *",
        2,
    )
    assert declared.next_at == NOON + MINUTE * 30


async def test_declare_does_not_change_a_schedule_that_was_edited_at_run_time(
    queue: AsyncTaskQueue, code: Any
) -> None:
    module = code(a={"cron": "0 * * * *"})
    await queue.schedules.declare(module)
    await queue.schedules.add("code_of_today.a", module.a, cron="15 * * * *")
    await queue.schedules.declare(module)
    await queue.schedules.declare(code())

    (schedule,) = await queue.schedules.list()
    assert (schedule.cron, schedule.declared) == ("15 * * * *", False)


# The blocking face


def test_blocking_schedules_do_the_same() -> None:
    with TaskQueue("memory://") as queue:
        added = queue.schedules.add("s", sample_tasks.report, cron="0 0 1 1 *")
        handle = queue.schedules.trigger("s")
        first = added.next_at
        assert first is not None
        (filled,) = queue.schedules.backfill("s", first, first)

        assert queue.schedules.get("s") == queue.schedules.list()[0]
        assert queue.schedules.upcoming("s", 1) == [first]
        assert {handle.id, filled.id} == {task.id for task in queue.list_tasks()}
        assert queue.schedules.pause("s").paused
        assert not queue.schedules.resume("s").paused
        assert len(queue.schedules.declare(sample_tasks)) == 2
        assert queue.schedules.delete("s")
