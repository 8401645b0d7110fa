"""Problems of a queue: `health()` lists them, and every worker reports them as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from omniq import (
    AsyncTaskQueue,
    BreakerRule,
    BreakerState,
    Health,
    InvalidValue,
    Runnable,
    Settings,
    StuckTask,
    TaskQueue,
)
from omniq.events import ClockDiffers, Dispatcher, Event, TaskStuck, WorkerStalled
from omniq.outcomes import Released
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from omniq.worker.fleet_alerts import FleetAlerts
from omniq.worker.stats_recorder import StatsRecorder
from tests.worker import guarded_tasks, hostile_tasks
from tests.worker.recorder import until

LEASE = 1000.0

# The documented defaults of `stalled_after`, `stuck_grace` and `endless_after`.
OVERDUE, GRACE, ENDLESS = timedelta(seconds=10), timedelta(seconds=10), timedelta(hours=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def storage(clock: ManualClock) -> AsyncIterator[MemoryStorage]:
    async with MemoryStorage(clock=clock) as storage:
        yield storage


@pytest.fixture
def queue(storage: MemoryStorage) -> AsyncTaskQueue:
    return AsyncTaskQueue(storage)


@pytest.fixture
async def worker(storage: MemoryStorage) -> AsyncIterator[MemoryStorage]:
    """Another worker, which renews its lease when the test calls for it."""
    async with storage.another() as worker:
        await worker.renew(lease=LEASE, concurrency=4)
        yield worker


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def alerts(storage: MemoryStorage, emitted: list[Event]) -> FleetAlerts:
    dispatcher = Dispatcher()
    dispatcher.subscribe(emitted.append)
    return FleetAlerts(storage, dispatcher, StatsRecorder(dispatcher))


async def test_a_quiet_queue_has_no_problems(queue, worker):
    health = await queue.health()

    assert health == Health(
        workers=1,
        waiting=0,
        oldest_due_age=0.0,
        stalled=(),
        stuck=(),
        breakers=(),
        paused={},
        dead=0,
    )
    assert health.problems == []


async def test_a_store_that_went_back_is_a_problem_for_a_day(queue, storage, worker, clock):
    await storage.mark_restored()
    health = await queue.health()

    assert health.went_back_at == clock.now()
    assert any("the store went back" in problem for problem in health.problems)
    clock.advance(86_400)
    assert (await queue.health()).went_back_at is None


async def test_a_worker_whose_heartbeat_is_late_is_stalled_until_the_next_renewal(
    queue, worker, clock
):
    clock.advance(OVERDUE)
    assert [info.stalled for info in await queue.workers()] == [False]
    clock.advance(0.001)
    (stalled,) = (await queue.health()).stalled
    assert [info.stalled for info in await queue.workers()] == [True]
    await worker.renew(lease=LEASE, concurrency=4)

    assert stalled.id == worker.owner
    assert [info.stalled for info in await queue.workers()] == [False]


async def test_a_storage_that_claims_without_a_pool_is_never_stalled(queue, storage, clock):
    await storage.renew(lease=LEASE)
    clock.advance(OVERDUE * 2)

    assert [info.stalled for info in await queue.workers()] == [False]


async def test_monitor_detects_stalls_and_reports_each_once(alerts, worker, emitted, clock):
    await alerts.check_workers()
    clock.advance(OVERDUE * 2)
    await alerts.check_workers()
    await alerts.check_workers()
    (event,) = emitted
    assert isinstance(event, WorkerStalled)
    assert (event.owner, event.running) == (worker.owner, 0)
    await worker.renew(lease=LEASE, concurrency=4)
    await alerts.check_workers()
    clock.advance(OVERDUE * 2)
    await alerts.check_workers()

    assert [type(event) for event in emitted] == [WorkerStalled, WorkerStalled]


async def test_a_worker_does_not_report_itself_as_stalled(alerts, storage, emitted, clock):
    """After a block its own heartbeat is late, but it runs again: it has just looked."""
    await storage.renew(lease=LEASE, concurrency=4)
    clock.advance(OVERDUE * 2)
    await alerts.check_workers()

    assert emitted == []


async def test_a_stalled_worker_is_reported_with_the_age_of_its_heartbeat(
    alerts, worker, emitted, clock
):
    clock.advance(OVERDUE * 2)
    await alerts.check_workers()

    (event,) = emitted
    assert event.elapsed == (OVERDUE * 2).total_seconds()
    assert clock.now() - event.last_heartbeat == timedelta(seconds=event.elapsed)


async def test_a_worker_whose_wall_clock_differs_by_more_than_a_lease_is_reported_once(
    alerts, queue, worker, emitted, clock
):
    lease = timedelta(seconds=queue.storage.settings.lease)
    clock.jump(-lease)
    await alerts.check_workers()
    assert emitted == []
    assert (await queue.health()).clocks == {}
    clock.jump(-lease)
    await alerts.check_workers()
    await alerts.check_workers()
    (event,) = emitted

    assert isinstance(event, ClockDiffers)
    assert (event.owner, event.seconds) == (worker.owner, 2 * lease.total_seconds())
    health = await queue.health()
    assert health.clocks == {worker.owner: 2 * lease.total_seconds()}
    assert health.problems == [
        f"the clock of worker {worker.owner} differs from this one by +{event.seconds:.0f} s"
    ]


async def test_a_task_that_outlasts_its_timeout_is_stuck(queue, worker, clock):
    handle = await queue.options(timeout=60).enqueue(guarded_tasks.add, 1)
    (task,) = await worker.reserve(1)
    clock.advance(60 + GRACE.total_seconds() - 0.001)
    assert (await queue.health()).stuck == ()
    clock.advance(0.001)

    assert (await queue.health()).stuck == (
        StuckTask(
            task_id=handle.id,
            func_path=task.func_path,
            queue="default",
            owner=worker.owner,
            attempt=1,
            deliveries=1,
            seconds=70.0,
        ),
    )


@pytest.mark.parametrize("default", [None, 30.0])
async def test_a_task_without_a_timeout_uses_the_default_timeout(clock, default):
    async with MemoryStorage(clock=clock, settings=Settings(default_timeout=default)) as storage:
        queue = AsyncTaskQueue(storage)
        await queue.enqueue(guarded_tasks.add, 1)
        await storage.renew(lease=10 * LEASE, concurrency=1)
        await storage.reserve(1)
        limit = ENDLESS.total_seconds() if default is None else default + GRACE.total_seconds()
        clock.advance(limit - 0.001)
        assert (await queue.health()).stuck == ()
        clock.advance(0.001)

        assert len((await queue.health()).stuck) == 1


async def test_the_settings_say_when_a_worker_is_stalled_and_a_task_stuck(clock, emitted):
    limits = Settings(
        stalled_after=100, stuck_grace=50, endless_after=400, default_timeout=None, lease=LEASE
    )
    async with MemoryStorage(clock=clock, settings=limits) as storage:
        queue, dispatcher = AsyncTaskQueue(storage), Dispatcher()
        dispatcher.subscribe(emitted.append)
        alerts = FleetAlerts(storage, dispatcher, StatsRecorder(dispatcher))
        await queue.options(timeout=60, task_id="bounded").enqueue(guarded_tasks.add, 1)
        await queue.options(task_id="endless").enqueue(guarded_tasks.add, 1)
        async with storage.another() as worker:
            await worker.renew(lease=LEASE, concurrency=4)
            await worker.reserve(2)
            seen = []
            for seconds in (99, 2, 8, 2, 288, 2):
                clock.advance(seconds)
                await alerts.check_workers()
                await alerts.check_workers()
                health = await queue.health()
                seen.append((bool(health.stalled), [stuck.task_id for stuck in health.stuck]))

    assert seen == [
        (False, []),
        (True, []),
        (True, []),
        (True, ["bounded"]),
        (True, ["bounded"]),
        (True, ["bounded", "endless"]),
    ]
    assert [type(event) for event in emitted] == [WorkerStalled, TaskStuck, TaskStuck]


async def test_arguments_of_health_replace_the_settings(queue, worker, clock):
    await queue.options(timeout=60).enqueue(guarded_tasks.add, 1)
    await worker.reserve(1)
    clock.advance(65)
    usual = await queue.health()
    strict = await queue.health(stuck_grace=5)
    lenient = await queue.health(stalled_after=timedelta(minutes=2))

    assert (len(usual.stalled), usual.stuck) == (1, ())
    assert len(strict.stuck) == 1
    assert lenient.stalled == ()
    with pytest.raises(InvalidValue, match="stalled_after"):
        await queue.health(stalled_after=-1)


async def test_a_stuck_task_is_reported_once_for_each_run(queue, alerts, worker, emitted, clock):
    await queue.options(timeout=5).enqueue(guarded_tasks.add, 1)
    for number in (1, 2):
        (task,) = await worker.reserve(1)
        for _ in range(8):
            await alerts.check_workers()
            clock.advance(5)
            await worker.renew(lease=LEASE, concurrency=4)
        assert len(emitted) == number
        await worker.record([Released(task.id, task.token)])

    assert [type(event) for event in emitted] == [TaskStuck, TaskStuck]
    assert [event.deliveries for event in emitted if isinstance(event, TaskStuck)] == [1, 2]


async def test_short_tasks_are_never_read_by_the_fleet_alerts(
    queue, storage, alerts, worker, clock
):
    reads = count_reads(storage)
    for _ in range(5):
        await queue.enqueue(guarded_tasks.add, 1)
        (task,) = await worker.reserve(1)
        await alerts.check_workers()
        await worker.record([Released(task.id, task.token)])
        await storage.cancel(task.id)
        clock.advance(5)

    assert reads == []


async def test_a_long_task_is_read_once_until_it_may_be_stuck(
    queue, storage, alerts, worker, clock
):
    reads = count_reads(storage)
    await queue.options(timeout=100).enqueue(guarded_tasks.add, 1)
    await worker.reserve(1)
    for _ in range(20):
        await alerts.check_workers()
        clock.advance(5)
        await worker.renew(lease=LEASE, concurrency=4)

    assert len(reads) == 1


def count_reads(storage: MemoryStorage) -> list[str]:
    reads: list[str] = []
    get_task = storage.get_task

    async def counted(task_id: str):
        reads.append(task_id)
        return await get_task(task_id)

    storage.get_task = counted  # type: ignore[method-assign]
    return reads


async def test_the_problems_name_everything_that_needs_an_operator(queue, storage, clock):
    rule = BreakerRule(name="smtp", max_failures=1)
    await queue.options(breaker=rule, max_retries=0).enqueue(guarded_tasks.fail, "down")
    await queue.worker().run_until_empty()
    await queue.options(queue="mail").enqueue(guarded_tasks.add, 1)
    await storage.pause_queue("mail")
    await storage.pause_queue("empty")
    clock.advance(7)
    health = await queue.health()

    assert (health.waiting, health.oldest_due_age, health.dead) == (1, 7.0, 1)
    assert health.paused == {"mail": 1}
    assert [breaker.state for breaker in health.breakers] == [BreakerState.OPEN]
    assert health.problems == [
        "breaker smtp is open: ValueError",
        "queue mail is paused and holds 1 tasks",
        "1 task waits and there is no worker",
        "1 dead letters wait for an operator",
    ]


async def test_functions_that_no_live_worker_can_run_are_a_problem(queue, storage, worker, clock):
    await worker.renew(lease=LEASE, concurrency=4, runnable=Runnable(modules=("mail",)))
    await queue.enqueue("shop.new")
    await queue.enqueue("shop.new")
    await queue.enqueue("mail.send")
    await queue.options(delay=3600).enqueue("shop.later")
    assert (await queue.health()).unrunnable == ()

    clock.advance(6)
    health = await queue.health()
    assert [(each.func_path, each.waiting) for each in health.unrunnable] == [("shop.new", 2)]
    assert health.problems == [
        f"2 tasks of shop.new: no live worker can run it ({worker.owner} runs mail)"
    ]


@pytest.mark.timeout(120)
async def test_another_worker_reports_a_blocked_event_loop(tmp_path, recorder):
    """The blocked worker reports it, from the thread that renews its lease."""
    url = f"sqlite:///{tmp_path}/q.db?durability=os"
    with TaskQueue(url) as blocked, TaskQueue(url) as elsewhere:
        blocked.options(max_retries=0).enqueue(hostile_tasks.blocks_the_loop, 2.5)
        with blocked.worker(lease=1.0, loop_patience=0.2):
            await until(lambda: any(info.stalled for info in elsewhere.workers()))
            assert len(elsewhere.health().stalled) == 1
            await until(lambda: not any(info.stalled for info in elsewhere.workers()))
