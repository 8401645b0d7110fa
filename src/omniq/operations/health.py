"""The problems of a queue right now, computed from its storage on each call.

Nothing is stored for it. A worker is stalled when it reports so itself, from the thread that renews
its lease while its event loop is blocked, or when its lease is valid and its heartbeat is late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from omniq.clock import from_micros
from omniq.errors import InvalidValue
from omniq.gate_rules import BreakerState, GateState
from omniq.models import Task, TaskStatus, WorkerInfo, timeout_of
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.incarnation import StoreRecord
from omniq.storage.pauses import Pause
from omniq.storage.row_rules import FORMAT
from omniq.tasks.durations import Duration, seconds_of
from omniq.text.to_json import JsonRecord

_BREAKER = "breaker:"

_PATIENCE = 5.0
"""How many seconds a task must have been due before `health` checks whether any worker can run it."""

_SHOWN_FOR = timedelta(days=1)
"""How long `health` says that the store went back to an earlier state."""

_MAX_READ = 1_000
_MAX_SHOWN = 5


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True):
    """From when on a worker is stalled, and a task stuck, in seconds.

    `stalled_after`: the age of a worker's last heartbeat; a pool sends one at least every two seconds.
    `stuck_grace`: how long a run may exceed its timeout, because its worker needs time to stop it.
    `endless_after`: how long a run without a timeout may take.
    """

    stalled_after: float
    stuck_grace: float
    endless_after: float

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        stalled_after: Duration | None = None,
        stuck_grace: Duration | None = None,
        endless_after: Duration | None = None,
    ) -> HealthLimits:
        """These limits, and those of the settings for what is not given."""
        given = {
            "stalled_after": stalled_after,
            "stuck_grace": stuck_grace,
            "endless_after": endless_after,
        }
        seconds = {
            name: seconds_of(name, value, error=InvalidValue) for name, value in given.items()
        }
        return cls(
            **{
                name: getattr(settings, name) if value is None else value
                for name, value in seconds.items()
            }
        )


class BreakerInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A circuit breaker that the fleet shares. `probe` is the task that probes it now, if any.

    `opened_at` and `reason`, the type of the last error, are set while it is not closed.
    """

    name: str
    state: BreakerState
    failures: int = 0
    reason: str = ""
    opened_at: datetime | None = None
    probe: str | None = None


class StuckTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that has run for longer than it may. `deliveries`: how often it has been claimed."""

    task_id: str
    func_path: str
    queue: str
    owner: str
    attempt: int
    deliveries: int
    seconds: float


class UnrunnableFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that no live worker can run, although `waiting` tasks of it are due.

    They are counted among the first 1,000 waiting tasks. `runs`: what each live worker can run, by the
    worker's id.
    """

    func_path: str
    waiting: int
    runs: dict[str, str]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a queue that an operator checks first.

    `oldest_due_age` is in seconds. `paused`: the number of tasks in each paused queue that has any.
    `clocks`: by how many seconds the wall clock of each worker whose clock is wrong is ahead of this one.
    `went_back_at`: when the store went back to an earlier state, if that was within the last day.
    `newer`: how many of the first 1,000 waiting tasks only a newer omniq can run.
    """

    workers: int
    waiting: int
    oldest_due_age: float
    stalled: tuple[WorkerInfo, ...]
    stuck: tuple[StuckTask, ...]
    breakers: tuple[BreakerInfo, ...]
    paused: dict[str, int]
    dead: int
    unrunnable: tuple[UnrunnableFunction, ...] = ()
    clocks: dict[str, float] = {}
    went_back_at: datetime | None = None
    newer: int = 0
    paused_functions: tuple[Pause, ...] = ()

    @property
    def problems(self) -> list[str]:
        """What an operator should act on, one line each. Dead letters count as a problem."""
        found = [f"worker {worker.id} is stalled" for worker in self.stalled]
        found += [
            f"task {task.task_id} of {task.func_path} has run for {task.seconds:.0f} s"
            for task in self.stuck
        ]
        found += [
            f"breaker {breaker.name} is {breaker.state}: {breaker.reason or 'no reason stored'}"
            for breaker in self.breakers
        ]
        found += [
            f"queue {queue} is paused and holds {count} tasks"
            for queue, count in self.paused.items()
        ]
        found += [
            f"function {each.name} is paused: {each.reason or 'no reason given'}"
            for each in self.paused_functions
        ]
        found += [describe_unrunnable(each) for each in self.unrunnable]
        found += [
            f"the clock of worker {worker} differs from this one by {seconds:+.0f} s"
            for worker, seconds in self.clocks.items()
        ]
        if self.newer:
            found.append(f"{self.newer} tasks wait for a worker with a newer omniq")
        if self.went_back_at is not None:
            found.append(
                f"the store went back to an earlier state at {self.went_back_at:%F %T} UTC"
            )
        if self.waiting and not self.workers:
            waits = "1 task waits" if self.waiting == 1 else f"{self.waiting} tasks wait"
            found.append(f"{waits} and there is no worker")
        if self.dead:
            found.append(f"{self.dead} dead letters wait for an operator")
        return found


async def health_of(storage: BaseStorage, limits: HealthLimits | None = None) -> Health:
    """The health of the queue in that storage. Costs one read per running task, and a few more.

    Without limits, those of the storage's settings apply.
    """
    limits = limits or HealthLimits.of(storage.settings)
    counted = await storage.stats()
    record = await storage.store_record()
    workers = await live_workers(storage, limits)
    pauses = await storage.pauses()
    paused = {each.queue for each in pauses if each.queue is not None}
    breakers = await breakers_of(storage)
    return Health(
        workers=len(workers),
        waiting=counted.by_status[TaskStatus.PENDING] + counted.by_status[TaskStatus.RETRYING],
        oldest_due_age=counted.oldest_due_age,
        stalled=tuple(worker for worker in workers if worker.stalled),
        stuck=tuple(await _stuck_tasks(storage, workers, limits)),
        breakers=tuple(each for each in breakers if each.state is not BreakerState.CLOSED),
        paused={name: count for name, count in counted.by_queue.items() if name in paused},
        dead=counted.dead,
        unrunnable=tuple(await unrunnable_functions(storage, workers, counted.oldest_due_age)),
        clocks=clock_differences(storage, workers),
        went_back_at=_went_back_at(storage, record),
        newer=await storage.count_newer() if record.format > FORMAT else 0,
        paused_functions=tuple(each for each in pauses if each.function is not None),
    )


def _went_back_at(storage: BaseStorage, record: StoreRecord) -> datetime | None:
    at = from_micros(record.raised_at)
    return at if storage.clock.now() - at < _SHOWN_FOR else None


async def live_workers(
    storage: BaseStorage, limits: HealthLimits | None = None
) -> list[WorkerInfo]:
    """Workers with a lease, those with a late heartbeat marked as stalled.

    An owner that claims without a pool (`concurrency` 0) sends no heartbeats and is never late.
    """
    now = storage.clock.now()
    seconds = storage.settings.stalled_after if limits is None else limits.stalled_after
    stalled_after = timedelta(seconds=seconds)
    return [
        msgspec.structs.replace(worker, stalled=True, late=True)
        if worker.concurrency and now - worker.last_heartbeat > stalled_after
        else worker
        for worker in await storage.workers()
    ]


def clock_differences(storage: BaseStorage, workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """By how many seconds the wall clocks of workers are ahead, by worker id; only if more than a lease.

    A worker with a valid lease has renewed it within its length, and wrote the time by its clock. On a
    server that is the server's clock, so the clocks differ only where a machine's clock is used.
    """
    now = storage.clock.now()
    limit = timedelta(seconds=max(storage.settings.lease, storage.settings.stalled_after))
    return {
        worker.id: (worker.last_heartbeat - now).total_seconds()
        for worker in workers
        if worker.concurrency and abs(worker.last_heartbeat - now) > limit
    }


async def unrunnable_functions(
    storage: BaseStorage, workers: Sequence[WorkerInfo], oldest_due_age: float
) -> list[UnrunnableFunction]:
    """The functions that none of the workers can run and that due tasks need, sorted by path.

    Reads nothing while no task has been due for some seconds, and without a worker: then it is the
    workers that are missing.
    """
    if not workers or oldest_due_age < _PATIENCE:
        return []
    waiting = Counter(task.func_path for task in await unrunnable_tasks(storage, workers))
    runs = {worker.id: str(worker.runnable or "all") for worker in workers} if waiting else {}
    return [
        UnrunnableFunction(func_path=func_path, waiting=count, runs=runs)
        for func_path, count in sorted(waiting.items())
    ]


async def unrunnable_tasks(storage: BaseStorage, workers: Sequence[WorkerInfo]) -> list[Task]:
    """The due tasks that none of the workers can run, among the first 1,000 that wait."""
    now = storage.clock.now()
    found: list[Task] = []
    for status in (TaskStatus.PENDING, TaskStatus.RETRYING):
        page = await storage.list_tasks(status=status, limit=_MAX_READ)
        due = [task for task in page if task.owner is None and due_time(task) <= now]
        unrunnable = {
            func_path
            for func_path in {task.func_path for task in due}
            if not any(worker.can_run(func_path) for worker in workers)
        }
        found += [task for task in due if task.func_path in unrunnable]
    return found


def describe_unrunnable(function: UnrunnableFunction) -> str:
    """The problem in one line: the function, how many tasks wait for it, what the workers run."""
    tasks = "1 task" if function.waiting == 1 else f"{function.waiting} tasks"
    shown = [f"{worker} runs {runs}" for worker, runs in sorted(function.runs.items())]
    more = f", and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return (
        f"{tasks} of {function.func_path}: no live worker can run it "
        f"({', '.join(shown[:_MAX_SHOWN])}{more})"
    )


def due_time(task: Task) -> datetime:
    """When the task is or was due."""
    return task.eta or task.created_at


async def _stuck_tasks(
    storage: BaseStorage, workers: Iterable[WorkerInfo], limits: HealthLimits
) -> list[StuckTask]:
    now = storage.clock.now()
    held = [task_id for worker in workers for task_id in worker.running]
    tasks = [await storage.get_task(task_id) for task_id in held]
    return [
        as_stuck(task, now)
        for task in tasks
        if task is not None and stuck_from(task, storage.settings, limits) <= now
    ]


def stuck_from(task: Task, settings: Settings, limits: HealthLimits | None = None) -> datetime:
    """When a running task counts as stuck; the latest datetime when it does not run."""
    if task.status is not TaskStatus.RUNNING or task.started_at is None:
        return datetime.max.replace(tzinfo=task.created_at.tzinfo)
    limits = limits or HealthLimits.of(settings)
    timeout = timeout_of(task, settings.default_timeout)
    seconds = limits.endless_after if timeout is None else timeout + limits.stuck_grace
    return task.started_at + timedelta(seconds=seconds)


def as_stuck(task: Task, now: datetime) -> StuckTask:
    """The report of a stuck task."""
    began = task.started_at or now
    return StuckTask(
        task_id=task.id,
        func_path=task.func_path,
        queue=task.queue,
        owner=task.owner or "",
        attempt=task.attempts + task.crashes + 1,
        deliveries=task.token,
        seconds=(now - began).total_seconds(),
    )


async def breakers_of(storage: BaseStorage) -> list[BreakerInfo]:
    """Every breaker that a claimed task has named, sorted by name."""
    return [
        _breaker(key.removeprefix(_BREAKER), state)
        for key, state in sorted((await storage.gates()).items())
        if key.startswith(_BREAKER)
    ]


def _breaker(name: str, state: GateState) -> BreakerInfo:
    if state.breaker is BreakerState.CLOSED:
        return BreakerInfo(name=name, state=state.breaker, failures=state.failures)
    return BreakerInfo(
        name=name,
        state=state.breaker,
        failures=state.failures,
        reason=state.reason,
        opened_at=from_micros(state.opened_at),
        probe=state.holders[0][0] if state.holders else None,
    )
