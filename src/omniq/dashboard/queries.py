"""Query parameters as data, and the reads that the pages and the API share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from omniq.dashboard.app_state import AppState
from omniq.durations import UNIT_SECONDS
from omniq.errors import InvalidValue
from omniq.masking import is_secret_name
from omniq.models import DeadLetter, Progress, Schedule, Task, TaskStatus, WorkerInfo
from omniq.operations.dead_groups import DeadGroups, dead_groups
from omniq.operations.find_tasks import TaskFilter, TaskPage, find_tasks
from omniq.operations.health import live_workers
from omniq.operations.newest import newest_tasks
from omniq.operations.redaction import redacted, without_secrets
from omniq.operations.task_detail import TaskDetail
from omniq.scheduling.due_times import task_id_at
from omniq.to_json import plain

MAX_LIMIT = 500
_AGE = re.compile(r"(\d{1,6})([smhdw])")
_MAX_RUNNING = 20
_SAMPLED_TASKS = 300
_FUNCTIONS_MAX_AGE = 30.0
_LAST_TIMES = 5
_DAY = timedelta(days=1)
_MAX_AGE_SECONDS = 50 * 365 * 86_400

Q = TypeVar("Q", bound=msgspec.Struct)

Text = Annotated[str, Meta(max_length=512)]
When = Annotated[
    str, Meta(max_length=64, description="an instant with its time zone, or an age: 15m, 2h, 7d")
]
Size = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class TasksQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks to list. `id` is a prefix of the id, `metadata` is name=value."""

    status: TaskStatus | None = None
    queue: Text | None = None
    function: Text | None = None
    id: Text = ""
    since: When | None = None
    until: When | None = None
    metadata: Text = ""
    limit: Size = 50
    cursor: Text | None = None


class DeadQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters to list, in order of id."""

    function: Text | None = None
    type: Text | None = None
    reason: Text | None = None
    limit: Size = 50
    after: Text | None = None


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No query parameters."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with its running tasks; the first 20 if there are more."""

    worker: WorkerInfo
    tasks: tuple[tuple[Task, Progress | None], ...]


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, its next times, and its newest stored tasks, newest first."""

    schedule: Schedule
    upcoming: tuple[datetime, ...]
    last: tuple[Task, ...]


def parse_query(kind: type[Q], given: Sequence[tuple[str, str]]) -> Q:
    """The parsed query string. Empty form fields are ignored."""
    fields = {name: text for name, text in given if text}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{error}") from None


async def list_tasks_page(state: AppState, query: TasksQuery) -> TaskPage:
    """A page of tasks."""
    now = state.clock.now()
    wanted = TaskFilter(
        status=query.status,
        queue=query.queue,
        func_path=query.function,
        prefix=query.id,
        since=_instant("since", query.since, now),
        until=_instant("until", query.until, now),
        metadata=_pairs(query.metadata),
    )
    return await state.cached(
        query,
        lambda: find_tasks(state.storage, wanted, limit=query.limit, cursor=query.cursor),
    )


async def list_dead_page(state: AppState, query: DeadQuery) -> list[DeadLetter]:
    """A page of dead letters."""
    return await state.cached(
        query,
        lambda: state.storage.list_dead(
            func_path=query.function,
            task_type=query.type,
            reason=query.reason,
            limit=query.limit,
            after=query.after,
        ),
    )


async def list_dead_groups(state: AppState) -> DeadGroups:
    """The dead letters by function and reason."""
    return await state.cached("groups", lambda: dead_groups(state.storage))


async def list_workers(state: AppState) -> list[WorkerView]:
    """Every live worker with its running tasks."""

    async def read() -> list[WorkerView]:
        return [
            WorkerView(worker=worker, tasks=await _running(state, worker))
            for worker in await live_workers(state.storage)
        ]

    return await state.cached("workers", read)


async def _running(state: AppState, worker: WorkerInfo) -> tuple[tuple[Task, Progress | None], ...]:
    tasks = []
    for task_id in worker.running[:_MAX_RUNNING]:
        task = await state.storage.get_task(task_id)
        if task is not None:
            tasks.append((task, await state.storage.get_progress(task_id)))
    return tuple(tasks)


async def list_schedules(state: AppState) -> list[ScheduleView]:
    """Every schedule with its next times and last tasks."""

    async def read() -> list[ScheduleView]:
        return [await _schedule(state, each) for each in await state.queue.schedules.list()]

    return await state.cached("schedules", read)


async def _schedule(state: AppState, schedule: Schedule) -> ScheduleView:
    return ScheduleView(
        schedule=schedule,
        upcoming=tuple(await state.queue.schedules.upcoming(schedule.id, 3)),
        last=await _last_tasks(state, schedule),
    )


async def _last_tasks(state: AppState, schedule: Schedule) -> tuple[Task, ...]:
    """The newest tasks of the schedule.

    Their ids start with the schedule's id, followed by the time, so they are adjacent in the order
    of ids.
    """
    last, following = schedule.last_at, schedule.next_at
    if last is None:
        return ()
    interval = following - last if following is not None and following > last else _DAY
    listed = await state.storage.list_tasks(
        after=task_id_at(schedule.id, last - interval * _LAST_TIMES), limit=_LAST_TIMES * 2
    )
    own = [task for task in listed if task.schedule_id == schedule.id]
    return tuple(reversed(own[-_LAST_TIMES:]))


async def recent_functions(state: AppState) -> list[str]:
    """The functions of the newest 300 tasks, as suggestions; cached for 30 seconds."""

    async def read() -> list[str]:
        tasks = await newest_tasks(state.storage, _SAMPLED_TASKS)
        return sorted({task.func_path for task in tasks})

    return await state.cached("functions", read, max_age=_FUNCTIONS_MAX_AGE)


def task_json(task: Task) -> dict[str, Any]:
    """A task as JSON, with the secrets in its arguments and metadata redacted."""
    safe = without_secrets(task)
    hidden = {name: plain(getattr(safe, name)) for name in ("args", "kwargs", "metadata")}
    shown: dict[str, Any] = plain(task)
    return {**shown, **hidden}


def dead_letter_json(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as JSON, without the checkpoint of its task."""
    shown: dict[str, Any] = plain(msgspec.structs.replace(letter, checkpoint=None))
    del shown["checkpoint"]
    return shown


def detail_json(detail: TaskDetail) -> dict[str, Any]:
    """All details of a task as JSON, with secrets redacted."""
    shown: dict[str, Any] = plain(msgspec.structs.replace(detail, dead=None))
    shown["task"] = task_json(detail.task)
    shown["steps"] = [
        {"name": step.name, "result": plain(redacted(step.result))} for step in detail.steps
    ]
    if detail.result is not None:
        shown["result"]["result"] = plain(redacted(detail.result.result))
    shown["dead"] = None if detail.dead is None else dead_letter_json(detail.dead)
    return shown


def schedule_json(view: ScheduleView) -> dict[str, Any]:
    """A schedule as JSON, with secrets redacted."""
    shown: dict[str, Any] = plain(view.schedule)
    return {
        **shown,
        "task": task_json(view.schedule.task),
        "upcoming": plain(view.upcoming),
        "last": [task_json(task) for task in view.last],
    }


def worker_json(view: WorkerView) -> dict[str, Any]:
    """A worker as JSON, with secrets redacted."""
    shown: dict[str, Any] = plain(view.worker)
    tasks = [{"task": task_json(task), "progress": plain(done)} for task, done in view.tasks]
    return {**shown, "tasks": tasks}


def _instant(name: str, text: str | None, now: datetime) -> datetime | None:
    """The instant that the text names, either directly or as an age."""
    if text is None:
        return None
    if age := _AGE.fullmatch(text.strip()):
        return now - timedelta(seconds=min(int(age[1]) * UNIT_SECONDS[age[2]], _MAX_AGE_SECONDS))
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidValue(
            f"{name} {text}: expected an instant such as 2026-01-31T12:00Z, or 15m, 2h, 7d"
        ) from None
    return _bounded(name, instant.replace(tzinfo=instant.tzinfo or UTC))


def _bounded(name: str, instant: datetime) -> datetime:
    if not 1970 < instant.year < 9000:
        raise InvalidValue(f"{name}: expected a year after 1970 and before 9000")
    return instant


def _pairs(text: str) -> dict[str, str]:
    if not text:
        return {}
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidValue(f"metadata {text}: expected name=value")
    if is_secret_name(name):
        # A filter would show which guess of a hidden value is right.
        raise InvalidValue(f"metadata {name.strip()}: is hidden, so tasks cannot be found by it")
    return {name.strip(): value.strip()}
