"""Schedules, to look at and to change while workers run: `queue.schedules`, on both faces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice, takewhile
from types import ModuleType
from typing import Any, TypedDict, Unpack

from msgspec.structs import replace

from omniq._portal import Portal
from omniq.durations import Duration, seconds_of
from omniq.errors import DuplicateTask, InvalidTask, InvalidValue, ScheduleNotFound
from omniq.models import (
    BreakerRule,
    MissedPolicy,
    OverlapPolicy,
    Schedule,
    Task,
    check_instant,
    check_int,
    check_schedule,
)
from omniq.retry import Backoff
from omniq.scheduling.due_times import (
    TEMPLATE_EPOCH,
    first_after,
    nominal_times,
    task_at,
    task_now,
)
from omniq.storage.base import BaseStorage
from omniq.tasks.functions import declared_in, options_of, path_of
from omniq.tasks.handle import AsyncTaskHandle, TaskHandle
from omniq.tasks.signature import callee_of
from omniq.tasks.task_builder import TaskBuilder, call_options

_TIMING = ("cron", "tz", "interval", "at", "start", "end")
_POLICIES = ("missed", "max_missed", "overlap", "jitter")
_DURATIONS = ("interval", "jitter")
_INSTANT = timedelta(microseconds=1)
_MOST_AT_ONCE = 10_000


class ScheduleOptions(TypedDict, total=False):
    """What `schedules.add` takes: when, what becomes of odd cases, and how the tasks run.

    Give one of `cron` (with `tz`, or it is UTC), `interval` and `at`. Durations are seconds or
    `timedelta`.
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
    retry: Backoff | None
    timeout: Duration | None
    unique: str | Callable[..., str] | bool | None
    expires: Duration | None
    result_ttl: Duration | None
    metadata: dict[str, Any] | None
    breaker: str | BreakerRule | Sequence[str | BreakerRule] | None
    rate: str | tuple[int, Duration] | None
    max_running: int | None
    limit_key: str | Callable[..., str] | None


class AsyncSchedules:
    """The schedules of a storage. Any worker on it fires them; there is no scheduler to run."""

    def __init__(
        self,
        storage: BaseStorage,
        builder: TaskBuilder,
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._builder = builder

    async def list(self) -> list[Schedule]:
        """All of them, in id order."""
        return await self._storage.list_schedules()

    async def get(self, schedule_id: str) -> Schedule | None:
        """One of them, as it is now."""
        return await self._storage.get_schedule(schedule_id)

    async def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Enqueue a call of the function at certain times, from now on; replaces one of that id.

            await queue.schedules.add("nightly", report, args=("eu",), cron="0 3 * * *", tz="Europe/Berlin")

        `interval` counts from `start`, or the first time is one interval from now; `at` is one time
        alone. `missed` says what becomes of times when no worker was there: "once" (one run for all
        of them), "all" (each, but for the newest `max_missed` only) or "skip" (what is more than a
        minute late is left out). `overlap` says what becomes of a time when the run before it has
        not ended: "allow", "skip" (it is left out), "queue" (it waits) or "cancel_old" (that one is
        cancelled). With `jitter` a task is due up to so many seconds later, always the same for the
        same time. All other options are those of `queue.options(…)`; a task finds the time it
        stands for in `ctx.metadata["scheduled_for"]`.

        One that is replaced keeps its place in time where the timing is the same, and stays paused
        if it was. Raises `InvalidValue` for a schedule that cannot be fired or never would be, and
        `InvalidTask` for a bad call or a bad option of its task.
        """
        check_call(func, args, kwargs or {})
        schedule = self._built(schedule_id, func, args, kwargs or {}, options)
        return await self._keep(schedule)

    async def pause(self, schedule_id: str) -> Schedule:
        """Fire it no more until it is resumed. What it has enqueued is not touched."""
        return await self._change(schedule_id, lambda schedule: replace(schedule, paused=True))

    async def resume(self, schedule_id: str) -> Schedule:
        """Fire it again, from its next time on; those that passed meanwhile are not made up for."""

        def resumed(schedule: Schedule) -> Schedule:
            if not schedule.paused:
                return schedule
            next_at = _first_from_now(schedule, self._clock.now())
            return replace(schedule, paused=False, next_at=next_at)

        return await self._change(schedule_id, resumed)

    async def trigger(self, schedule_id: str) -> AsyncTaskHandle[Any]:
        """Enqueue its task now, also if it is paused. Its times stay as they are."""
        now = self._clock.now()
        task = replace(task_now(await self._find(schedule_id), now), id=self._clock.new_id())
        return AsyncTaskHandle(self._storage, await self._storage.enqueue(task))

    async def delete(self, schedule_id: str) -> bool:
        """Forget it; False when there is none. What it has enqueued is not touched.

        One that stands in the code comes back with the next worker that starts: pause it instead.
        """
        return await self._storage.delete_schedule(schedule_id)

    async def backfill(
        self, schedule_id: str, start: datetime, end: datetime
    ) -> Sequence[AsyncTaskHandle[Any]]:
        """Enqueue each nominal time of [start, end] that has no task on record; those tasks.

        `start` and `end` of the schedule, its policies and whether it is paused do not matter.
        """
        check_instant("start", start, error=InvalidValue)
        check_instant("end", end, error=InvalidValue)
        schedule = await self._find(schedule_id)
        times = takewhile(lambda at: at <= end, nominal_times(schedule, start - _INSTANT))
        nominal = list(islice(times, _MOST_AT_ONCE + 1))
        if len(nominal) > _MOST_AT_ONCE:
            raise InvalidValue(
                f"schedule {schedule_id}: more than {_MOST_AT_ONCE} times in that window; "
                "backfill it in parts"
            )
        now = self._clock.now()
        enqueued: list[AsyncTaskHandle[Any]] = []
        for at in nominal:
            # A key that only one may hold would leave out all but the first.
            task = replace(task_at(schedule, at, now), unique=schedule.task.unique)
            try:
                enqueued.append(AsyncTaskHandle(self._storage, await self._storage.enqueue(task)))
            except DuplicateTask:
                continue
        return enqueued

    async def upcoming(self, schedule_id: str, n: int = 5) -> Sequence[datetime]:
        """The next `n` nominal times, in UTC; of a paused one, as if it were resumed now."""
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
        """Keep the schedules that stand in the code: `@task(cron=…)` and `@task(interval=…)`.

        `omniq worker` does it for its modules when it starts; with a pool made in code, call this.
        The id is the function's path. What the code has changed is changed; what has gone from one
        of these modules is deleted. One of the same id that was added by hand is left alone:
        whoever edits a declared schedule at run time has taken it over. A function that needs
        arguments declares nothing: `enqueue` repeats it with those it is given.
        """
        found = [function for source in sources for function in declared_in(source)]
        wanted = {path_of(func): func for func in found if _needs_nothing(func)}
        known = {schedule.id: schedule for schedule in await self._storage.list_schedules()}
        modules = {source.__name__ for source in sources if isinstance(source, ModuleType)}
        for schedule in known.values():
            has_gone = schedule.declared and schedule.id not in wanted
            if has_gone and schedule.task.func_path.rpartition(".")[0] in modules:
                await self._storage.delete_schedule(schedule.id)
        return [
            await self._keep(self._declared(path, func))
            for path, func in wanted.items()
            if path not in known or known[path].declared
        ]

    def _declared(self, path: str, func: Callable[..., Any]) -> Schedule:
        options = options_of(func)
        timing: dict[str, Any] = {"cron": options.cron, "tz": options.tz}
        if options.interval is not None:
            # Workers that start together must agree on its times, to the microsecond.
            timing = {"interval": options.interval, "start": TEMPLATE_EPOCH}
        return replace(self._built(path, func, (), {}, timing), declared=True)

    async def _find(self, schedule_id: str) -> Schedule:
        schedule = await self._storage.get_schedule(schedule_id)
        if schedule is None:
            raise ScheduleNotFound(schedule_id)
        return schedule

    async def _change(self, schedule_id: str, change: Callable[[Schedule], Schedule]) -> Schedule:
        """Change it as it is now: whoever fires it meanwhile makes this look again."""
        while True:
            schedule = await self._find(schedule_id)
            changed = change(schedule)
            if changed == schedule or await self._storage.fire_schedule(schedule, changed, None):
                return changed

    async def _keep(self, schedule: Schedule) -> Schedule:
        """Put it in the place of the one with its id, if there is one."""
        now = self._clock.now()
        while True:
            known = await self._storage.get_schedule(schedule.id)
            placed = _placed(schedule, known, now)
            if placed.next_at is None and (known is None or known.next_at is not None):
                raise InvalidValue(f"schedule {schedule.id}: names no time that is still to come")
            if known is None:
                await self._storage.put_schedule(placed)
                return placed
            if replace(placed, version=known.version) == known:
                return known
            if await self._storage.fire_schedule(known, placed, None):
                return placed

    def _built(
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
        if isinstance(rest.get("expires"), datetime):
            raise InvalidTask("expires: the tasks of a schedule expire after a duration")
        task = self._builder.build(func, tuple(args), dict(kwargs), call_options(**rest))
        schedule = Schedule(id=schedule_id, task=_template(task), **own)
        check_schedule(schedule)
        return schedule


def check_call(
    func: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that the function does not take: better now than at three in the morning."""
    if isinstance(func, str):
        return
    path_of(func)
    context = (None,) if callee_of(func).takes_context else ()
    try:
        inspect.signature(func).bind(*context, *args, **kwargs)
    except TypeError as error:
        raise InvalidTask(f"{path_of(func)}: {error}") from error


def _needs_nothing(func: Callable[..., Any]) -> bool:
    try:
        check_call(func, (), {})
    except InvalidTask:
        return False
    return True


def _placed(schedule: Schedule, known: Schedule | None, now: datetime) -> Schedule:
    """The schedule with its place in time: that of the one it replaces, if the timing is the same."""
    if schedule.interval is not None and schedule.start is None:
        is_same = known is not None and known.interval == schedule.interval
        start = known.start if known is not None and is_same else None
        schedule = replace(schedule, start=start or now + timedelta(seconds=schedule.interval))
    if known is None:
        return replace(schedule, next_at=_first_from_now(schedule, now))
    is_same = all(getattr(known, field) == getattr(schedule, field) for field in _TIMING)
    placed = replace(schedule, last_at=known.last_at, paused=known.paused)
    next_at = known.next_at if is_same else _first_from_now(placed, now)
    return replace(placed, next_at=next_at)


def _first_from_now(schedule: Schedule, now: datetime) -> datetime | None:
    """The first time that is still to come, and was not fired by a clock that was ahead."""
    if schedule.at is not None:
        # One that has passed runs at once, unless it was fired.
        return None if schedule.last_at == schedule.at else schedule.at
    after = now if schedule.last_at is None else max(now, schedule.last_at)
    return first_after(schedule, after)


def _template(task: Task) -> Task:
    """What is the same for all tasks of a schedule."""
    lasts = None if task.expires is None else task.expires - task.created_at
    return replace(
        task,
        id="template",
        eta=None,
        cron=None,
        tz=None,
        interval=None,
        created_at=TEMPLATE_EPOCH,
        expires=None if lasts is None else TEMPLATE_EPOCH + lasts,
    )


class Schedules:
    """The schedules of a storage. The blocking face of `AsyncSchedules`."""

    def __init__(self, portal: Portal, schedules: AsyncSchedules) -> None:
        self._portal = portal
        self._schedules = schedules

    def list(self) -> list[Schedule]:
        """All of them, in id order."""
        return self._portal.run(self._schedules.list())

    def get(self, schedule_id: str) -> Schedule | None:
        """One of them, as it is now."""
        return self._portal.run(self._schedules.get(schedule_id))

    def add(
        self,
        schedule_id: str,
        func: Callable[..., Any] | str,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Enqueue a call of the function at certain times, from now on: see `AsyncSchedules.add`."""
        return self._portal.run(
            self._schedules.add(schedule_id, func, args=args, kwargs=kwargs, **options)
        )

    def pause(self, schedule_id: str) -> Schedule:
        """Fire it no more until it is resumed. What it has enqueued is not touched."""
        return self._portal.run(self._schedules.pause(schedule_id))

    def resume(self, schedule_id: str) -> Schedule:
        """Fire it again, from its next time on; those that passed meanwhile are not made up for."""
        return self._portal.run(self._schedules.resume(schedule_id))

    def trigger(self, schedule_id: str) -> TaskHandle[Any]:
        """Enqueue its task now, also if it is paused. Its times stay as they are."""
        return TaskHandle(self._portal, self._portal.run(self._schedules.trigger(schedule_id)))

    def delete(self, schedule_id: str) -> bool:
        """Forget it; False when there is none. What it has enqueued is not touched."""
        return self._portal.run(self._schedules.delete(schedule_id))

    def backfill(
        self, schedule_id: str, start: datetime, end: datetime
    ) -> Sequence[TaskHandle[Any]]:
        """Enqueue each nominal time of [start, end] that has no task on record; those tasks."""
        handles = self._portal.run(self._schedules.backfill(schedule_id, start, end))
        return [TaskHandle(self._portal, handle) for handle in handles]

    def upcoming(self, schedule_id: str, n: int = 5) -> Sequence[datetime]:
        """The next `n` nominal times, in UTC; of a paused one, as if it were resumed now."""
        return self._portal.run(self._schedules.upcoming(schedule_id, n))

    def declare(self, *sources: ModuleType | Callable[..., Any]) -> Sequence[Schedule]:
        """Keep the schedules that stand in the code: see `AsyncSchedules.declare`."""
        return self._portal.run(self._schedules.declare(*sources))
