"""`queue.schedules`: read, add and change schedules, for async and for blocking code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice, takewhile
from types import ModuleType
from typing import Any, TypedDict, TypeVarTuple, Unpack, overload

from msgspec.structs import replace

from omniq.concurrency.blocking import BlockingFace, blocking
from omniq.errors import (
    DuplicateTask,
    InvalidTask,
    InvalidValue,
    KeyNeeded,
    ScheduleNotFound,
    SerializationError,
    SettingsError,
)
from omniq.models import (
    BreakerRule,
    Limit,
    MissedPolicy,
    OverlapPolicy,
    Schedule,
    Task,
    check_instant,
    check_int,
    check_schedule,
)
from omniq.operations.check import Declarations
from omniq.operations.handle import AsyncTaskHandle, TaskHandle
from omniq.retry import Backoff
from omniq.scheduling.due_times import (
    TEMPLATE_EPOCH,
    first_after,
    nominal_times,
    task_at,
    task_now,
)
from omniq.storage.base import BaseStorage
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.context import TaskContext
from omniq.tasks.declared_schedules import Cron, DeclaredSchedule, Interval
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.functions import functions_in, options_of, own_path_of, path_of
from omniq.tasks.options import SequenceOnFailure, refuse_unknown
from omniq.tasks.task_builder import TaskBuilder, call_options

Ts = TypeVarTuple("Ts")
List = list[Any]
"""The classes below have a method `list`."""

_TIMING = ("cron", "tz", "interval", "at", "start", "end")
_POLICIES = ("missed", "max_missed", "overlap", "jitter")
_DURATIONS = ("interval", "jitter")
_INSTANT = timedelta(microseconds=1)
_MAX_BACKFILL = 10_000


class ScheduleOptions(TypedDict, total=False):
    """The options of `schedules.add`: the times, the policies, and the options of the tasks.

    Give one of `cron` (in the zone `tz`, by default UTC), `interval` and `at`. Durations are seconds
    or `timedelta`.
    """

    cron: str | None
    tz: str | None
    interval: Duration | None
    at: datetime | None
    start: datetime | None
    end: datetime | None
    missed: MissedPolicy
    max_missed: int
    overlap: OverlapPolicy
    jitter: Duration
    priority: int | None
    queue: str | None
    max_retries: int | None
    max_crashes: int | None
    retry: Backoff | Sequence[Duration] | None
    timeout: Duration | None
    unique: str | Callable[..., str] | bool | None
    expires: Duration | None
    result_ttl: Duration | None
    task_type: str | None
    version: int | None
    metadata: dict[str, Any] | None
    breaker: str | BreakerRule | Sequence[str | BreakerRule] | None
    rate: str | tuple[int, Duration] | None
    max_running: int | None
    limit_key: str | Callable[..., str] | None
    cost: float | Callable[..., float] | None
    limits: Sequence[Limit] | Callable[..., Sequence[Limit]] | None
    sequence: str | Callable[..., str] | None
    sequence_on_failure: SequenceOnFailure | None
    fair_key: str | Callable[..., str] | None
    fair_weight: float | Callable[..., float] | None
    ageing: Duration | None


class AsyncSchedules:
    """The schedules of a storage. Every worker fires them; there is no separate scheduler process."""

    def __init__(
        self,
        storage: BaseStorage,
        builder: TaskBuilder,
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._builder = builder

    async def list(self) -> list[Schedule]:
        """Return all schedules in id order."""
        return await self._storage.list_schedules()

    async def get(self, schedule_id: str) -> Schedule | None:
        """Return one schedule; None if there is none."""
        return await self._storage.get_schedule(schedule_id)

    @overload
    async def add(
        self,
        schedule_id: str,
        func: Callable[[TaskContext, Unpack[Ts]], Any],
        *,
        args: tuple[*Ts],
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    @overload
    async def add(
        self,
        schedule_id: str,
        func: Callable[[Unpack[Ts]], Any] | str,
        *,
        args: tuple[*Ts],
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    @overload
    async def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    @overload
    async def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: List = ...,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    async def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Enqueue a call of the function at certain times from now on; replace a schedule of that id.

            add("nightly", report, args=("eu",), cron="0 3 * * *", tz="Europe/Berlin")

        `interval` counts from `start`; without it the first time is one interval from now. `at` is a
        single time. `missed` decides about times that passed while no worker ran: "once" (one run
        for all of them), "all" (one run for each of the newest `max_missed`) or "skip" (no run for
        times that are more than a minute late). `overlap` decides about a time at which the
        previous run has not ended: "allow", "skip" (no task), "queue" (the task waits) or
        "cancel_old" (the previous run is cancelled). `jitter` delays each task by up to that many
        seconds; the delay of one nominal time is the same in every process. All other options are
        those of `queue.options(…)` that are not for one task only. A task finds its nominal time in
        `ctx.metadata["scheduled_for"]`.

        A replaced schedule keeps its next time if the timing is the same, and stays paused if it
        was. Raises `InvalidValue` for a schedule that cannot fire, and `InvalidTask` for a wrong
        call or a wrong option of its task.
        """
        schedule = self._build(schedule_id, func, args, kwargs or {}, options)
        return await self._save(schedule)

    async def pause(self, schedule_id: str) -> Schedule:
        """Stop the schedule until it is resumed. Tasks that it has enqueued are not changed."""
        return await self._change(schedule_id, lambda schedule: replace(schedule, paused=True))

    async def resume(self, schedule_id: str) -> Schedule:
        """Continue with the next time of the schedule. Times that passed during the pause are skipped."""

        def resumed(schedule: Schedule) -> Schedule:
            if not schedule.paused:
                return schedule
            next_at = _first_from_now(schedule, self._clock.now())
            return replace(schedule, paused=False, next_at=next_at)

        return await self._change(schedule_id, resumed)

    async def trigger(self, schedule_id: str) -> AsyncTaskHandle[Any]:
        """Enqueue the schedule's task now, also while it is paused. Its times do not change."""
        now = self._clock.now()
        task = replace(task_now(await self._find(schedule_id), now), id=self._clock.new_id())
        return AsyncTaskHandle(self._storage, await self._storage.enqueue(task))

    async def delete(self, schedule_id: str) -> bool:
        """Delete the schedule; False when there is none. Tasks that it has enqueued are not changed.

        The next worker that starts adds a schedule of `@task` again: pause such a schedule instead.
        """
        return await self._storage.delete_schedule(schedule_id)

    async def backfill(
        self, schedule_id: str, start: datetime, end: datetime
    ) -> Sequence[AsyncTaskHandle[Any]]:
        """Enqueue a task for each nominal time in [start, end] that has no record of one.

        The schedule's `start`, `end`, policies and pause are ignored.
        """
        check_instant("start", start, error=InvalidValue)
        check_instant("end", end, error=InvalidValue)
        schedule = await self._find(schedule_id)
        times = takewhile(lambda at: at <= end, nominal_times(schedule, start - _INSTANT))
        nominal = list(islice(times, _MAX_BACKFILL + 1))
        if len(nominal) > _MAX_BACKFILL:
            raise InvalidValue(
                f"schedule {schedule_id}: more than {_MAX_BACKFILL} times in that window; "
                "backfill it in parts"
            )
        now = self._clock.now()
        enqueued: list[AsyncTaskHandle[Any]] = []
        for at in nominal:
            # A key that only one task may hold would leave out all but the first.
            task = replace(task_at(schedule, at, now), unique=schedule.task.unique)
            try:
                enqueued.append(AsyncTaskHandle(self._storage, await self._storage.enqueue(task)))
            except DuplicateTask:
                continue
        return enqueued

    async def upcoming(self, schedule_id: str, n: int = 5) -> Sequence[datetime]:
        """Return the next `n` nominal times in UTC; of a paused schedule, as if it were resumed now."""
        check_int("n", n, low=0, error=InvalidValue)
        schedule = await self._find(schedule_id)
        first = (
            _first_from_now(schedule, self._clock.now()) if schedule.paused else schedule.next_at
        )
        if first is None:
            return []
        later = nominal_times(schedule, first)
        if schedule.end is not None:
            end = schedule.end
            later = takewhile(lambda at: at <= end, later)
        return [first, *islice(later, max(n - 1, 0))][:n]

    async def declare(self, *sources: ModuleType | Callable[..., Any]) -> Sequence[Schedule]:
        """Store the schedules of the code: `@task(cron=…)`, `interval=…` and `schedules=[…]`.

        `omniq worker` does this for its modules when it starts; for a pool in your code, call it
        yourself. The id is the function's name, or its path without one; for a call with arguments, a
        text that is made of these is added. A schedule that the code has changed is updated, and
        one that one of these modules no longer declares is deleted, also if its function has moved
        here and has its earlier path as an alias. A schedule of the same id that `add` stored is not
        changed: an edit at run time takes precedence over the code. A function that needs arguments
        declares none with `cron` or `interval`: `enqueue` repeats it with the given arguments. Raises `InvalidTask` for arguments that the function does not accept, and
        `SettingsError` for an id that two functions declare.
        """
        found = [function for source in sources for function in functions_in(source)]
        declared = self._all_declared(found)
        known = {schedule.id: schedule for schedule in await self._storage.list_schedules()}
        # One of the same id that waits for a seal may be an edit at run time.
        waiting = {older.id for older in await self._storage.older_documents(max_pages=0)}
        for schedule_id in sorted(_replaced(known.values(), sources, found) - declared.keys()):
            await self._storage.delete_schedule(schedule_id)
        return [
            await self._save(schedule)
            for schedule_id, schedule in declared.items()
            if schedule_id not in waiting
            and (schedule_id not in known or known[schedule_id].declared)
        ]

    async def preview(self, *sources: ModuleType | Callable[..., Any]) -> Declarations:
        """Return what `declare` would store, replace and delete, and what is wrong; changes nothing."""
        found = [function for source in sources for function in functions_in(source)]
        wrong: dict[str, str] = {}
        correct: list[Callable[..., Any]] = []
        for func in dict.fromkeys(found):
            try:
                list(self._declared(func))
            except (InvalidValue, SettingsError) as error:
                wrong[f"{func.__module__}.{func.__qualname__}"] = str(error)
            else:
                correct.append(func)
        declared: dict[str, Schedule] = {}
        try:
            declared = self._all_declared(correct)
        except SettingsError as error:
            wrong[""] = str(error)
        known = await self._storage.list_schedules()
        stored = frozenset(each.id for each in known if each.declared)
        replaced = _replaced(known, sources, found) | (stored & declared.keys())
        return Declarations(schedules=list(declared.values()), replaced=replaced, wrong=wrong)

    def _all_declared(self, functions: Iterable[Callable[..., Any]]) -> dict[str, Schedule]:
        declared: dict[str, Schedule] = {}
        for func in dict.fromkeys(functions):
            for schedule in self._declared(func):
                if (other := declared.get(schedule.id)) is not None:
                    raise SettingsError(
                        f"two schedules have the id {schedule.id}: of {other.task.func_path} and "
                        f"{schedule.task.func_path}; give one of them another id"
                    )
                declared[schedule.id] = schedule
        return declared

    def _declared(self, func: Callable[..., Any]) -> Iterator[Schedule]:
        options = options_of(func)
        if not (options.cron or options.interval or options.schedules):
            return
        path = path_of(func)
        several: Sequence[DeclaredSchedule] = options.schedules
        if options.cron is not None and _needs_no_arguments(func):
            several = [Cron(options.cron, tz=options.tz)]
        elif options.interval is not None and _needs_no_arguments(func):
            several = [Interval(options.interval)]
        ids: set[str] = set()
        for each in several:
            timing = each.timing() | each.policies()
            if "interval" in timing:
                # Workers that start together must compute the same times, to the microsecond.
                timing.setdefault("start", TEMPLATE_EPOCH)
            built = self._build(each.id or path, func, each.args, each.kwargs or {}, timing)
            schedule_id = each.id or self._id_of(path, built, ids)
            ids.add(schedule_id)
            # Not `__module__`, which is the same for every script.
            module = own_path_of(func).removesuffix(f".{func.__qualname__}")
            yield replace(built, id=schedule_id, declared=True, module=module)

    def _id_of(self, path: str, schedule: Schedule, taken: set[str]) -> str:
        """An id that stays the same when other schedules of the function are added, removed or moved.

        It depends on the arguments, and on the times only if an earlier schedule has the same arguments:
        a change of the times is no new schedule.
        """
        args, kwargs = schedule.task.args, schedule.task.kwargs
        plain = f"{path}-{self._builder.digest(path, args, kwargs)[:8]}" if args or kwargs else path
        if plain not in taken:
            return plain
        times = (schedule.cron, schedule.tz, schedule.interval)
        return f"{path}-{self._builder.digest(path, (args, times), kwargs)[:8]}"

    async def _find(self, schedule_id: str) -> Schedule:
        schedule = await self._storage.get_schedule(schedule_id)
        if schedule is None:
            raise ScheduleNotFound(schedule_id)
        return schedule

    async def _change(self, schedule_id: str, change: Callable[[Schedule], Schedule]) -> Schedule:
        """Change the stored schedule; read it again if a worker fires it in between."""
        while True:
            schedule = await self._find(schedule_id)
            changed = change(schedule)
            if changed == schedule or await self._storage.fire_schedule(schedule, changed, None):
                return changed

    async def _save(self, schedule: Schedule) -> Schedule:
        """Store the schedule in place of the one with its id, if there is one."""
        now = self._clock.now()
        while True:
            known = await self._replaceable(schedule.id)
            updated = _with_next_time(schedule, known, now)
            is_over = updated.next_at is None and (known is None or known.next_at is not None)
            # The code of a schedule that has ended may stay: it must not stop the worker.
            if is_over and not schedule.declared:
                raise InvalidValue(f"schedule {schedule.id}: names no time in the future")
            if known is None:
                await self._storage.put_schedule(updated)
                return updated
            if replace(updated, version=known.version) == known:
                return known
            if await self._storage.fire_schedule(known, updated, None):
                return updated

    async def _replaceable(self, schedule_id: str) -> Schedule | None:
        """The schedule with that id; None also for one that cannot be read: it is replaced as a whole."""
        try:
            return await self._storage.get_schedule(schedule_id)
        except KeyNeeded:
            raise
        except SerializationError:
            return None

    def _build(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Schedule:
        own: dict[str, Any] = {
            name: seconds_of(name, value, error=InvalidValue) if name in _DURATIONS else value
            for name, value in options.items()
            if name in (*_TIMING, *_POLICIES) and value is not None
        }
        if not own.keys() & {"cron", "interval", "at"}:
            raise InvalidValue(f"schedule {schedule_id}: give one of cron, interval and at")
        rest = {name: value for name, value in options.items() if name not in own}
        refuse_unknown("schedules.add", rest)
        if isinstance(rest.get("expires"), datetime):
            raise InvalidTask("expires: the tasks of a schedule expire after a duration")
        task = self._builder.build(func, tuple(args), dict(kwargs), call_options(**rest))
        schedule = Schedule(id=schedule_id, task=_template(task), **own)
        check_schedule(schedule)
        return schedule


def check_call(
    func: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise `InvalidTask` for arguments that the function does not accept, before they are stored."""
    if isinstance(func, str):
        return
    FunctionTypes(func, path_of(func)).check(tuple(args), kwargs)


def _replaced(
    known: Iterable[Schedule],
    sources: Iterable[ModuleType | Callable[..., Any]],
    functions: Iterable[Callable[..., Any]],
) -> frozenset[str]:
    """The ids of the stored schedules that these modules have declared, in this release or an earlier one."""
    modules = {source.__name__ for source in sources if isinstance(source, ModuleType)}
    # A function that has moved says where it was.
    moved = {alias for func in functions for alias in options_of(func).aliases}
    return frozenset(
        schedule.id
        for schedule in known
        if schedule.declared
        and (_declaring_module(schedule) in modules or schedule.task.func_path in moved)
    )


def _declaring_module(schedule: Schedule) -> str:
    # Releases before names did not store it.
    return schedule.module or schedule.task.func_path.rpartition(".")[0]


def _needs_no_arguments(func: Callable[..., Any]) -> bool:
    try:
        check_call(func, (), {})
    except InvalidTask:
        return False
    return True


def _with_next_time(schedule: Schedule, known: Schedule | None, now: datetime) -> Schedule:
    """Return the schedule with its next time: that of the replaced one, if the timing is the same."""
    if schedule.interval is not None and schedule.start is None:
        is_same = known is not None and known.interval == schedule.interval
        start = known.start if known is not None and is_same else None
        schedule = replace(schedule, start=start or now + timedelta(seconds=schedule.interval))
    if known is None:
        return replace(schedule, next_at=_first_from_now(schedule, now))
    is_same = all(getattr(known, field) == getattr(schedule, field) for field in _TIMING)
    updated = replace(schedule, last_at=known.last_at, paused=known.paused)
    next_at = known.next_at if is_same else _first_from_now(updated, now)
    return replace(updated, next_at=next_at)


def _first_from_now(schedule: Schedule, now: datetime) -> datetime | None:
    """Return the first future time that no worker with a fast clock has fired already."""
    if schedule.at is not None:
        # A time that has passed runs immediately, unless it was fired.
        return None if schedule.last_at == schedule.at else schedule.at
    after = now if schedule.last_at is None else max(now, schedule.last_at)
    return first_after(schedule, after)


def _template(task: Task) -> Task:
    """Return the template task: what all tasks of a schedule have in common."""
    lifetime = None if task.expires is None else task.expires - task.created_at
    return replace(
        task,
        id="template",
        eta=None,
        cron=None,
        tz=None,
        interval=None,
        reschedule_on_failure=False,
        created_at=TEMPLATE_EPOCH,
        expires=None if lifetime is None else TEMPLATE_EPOCH + lifetime,
    )


class Schedules(BlockingFace[AsyncSchedules]):
    """The schedules of a storage. The blocking form of `AsyncSchedules`."""

    list = blocking(AsyncSchedules.list)
    get = blocking(AsyncSchedules.get)
    pause = blocking(AsyncSchedules.pause)
    resume = blocking(AsyncSchedules.resume)
    delete = blocking(AsyncSchedules.delete)
    upcoming = blocking(AsyncSchedules.upcoming)
    declare = blocking(AsyncSchedules.declare)
    preview = blocking(AsyncSchedules.preview)

    @overload
    def add(
        self,
        schedule_id: str,
        func: Callable[[TaskContext, Unpack[Ts]], Any],
        *,
        args: tuple[*Ts],
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    @overload
    def add(
        self,
        schedule_id: str,
        func: Callable[[Unpack[Ts]], Any] | str,
        *,
        args: tuple[*Ts],
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    @overload
    def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    @overload
    def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: List = ...,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule: ...

    def add(
        self,
        schedule_id: str,
        func: Any,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Enqueue a call of the function at certain times from now on; replace a schedule of that id.

        See `AsyncSchedules.add`.
        """
        return self._run(
            self._async_face.add(schedule_id, func, args=args, kwargs=kwargs, **options)
        )

    def trigger(self, schedule_id: str) -> TaskHandle[Any]:
        """Enqueue the schedule's task now, also while it is paused. Its times do not change."""
        return TaskHandle(self._portal, self._run(self._async_face.trigger(schedule_id)))

    def backfill(
        self, schedule_id: str, start: datetime, end: datetime
    ) -> Sequence[TaskHandle[Any]]:
        """Enqueue a task for each nominal time in [start, end] that has no record of one.

        The schedule's `start`, `end`, policies and pause are ignored.
        """
        handles = self._run(self._async_face.backfill(schedule_id, start, end))
        return [TaskHandle(self._portal, handle) for handle in handles]
