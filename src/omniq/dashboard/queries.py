"""What can be asked, as data: checked once, answered from one place for pages and programs alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from omniq.dashboard.app_state import AppState
from omniq.errors import InvalidValue
from omniq.models import DeadLetter, Progress, Schedule, Task, TaskStatus, WorkerInfo
from omniq.operations.dead_groups import DeadGroups, dead_groups
from omniq.operations.find_tasks import TaskFilter, TaskPage, find_tasks
from omniq.operations.newest import newest_tasks
from omniq.operations.redaction import redacted, without_secrets
from omniq.operations.task_detail import TaskDetail
from omniq.scheduling.due_times import task_id_at
from omniq.storage.health import live_workers
from omniq.to_json import plain

MOST = 500
_SPAN = re.compile(r"(\d{1,6})([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_MOST_RUNNING = 20
_MOST_LEARNT = 300
_LEARNT_SECONDS = 30.0
_LAST_TIMES = 5
_A_DAY = timedelta(days=1)
_LONGEST_SPAN = 50 * 365 * 86_400

Q = TypeVar("Q", bound=msgspec.Struct)

Text = Annotated[str, Meta(max_length=512)]
When = Annotated[str, Meta(max_length=64, description="an instant with its zone, or 15m, 2h, 7d")]
Size = Annotated[int, Meta(ge=1, le=MOST)]


class TasksQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks to list. `id` is how the id begins, `metadata` is name=value."""

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
    reason: Text | None = None
    limit: Size = 50
    after: Text | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question without conditions."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with what it runs; of very many, the first."""

    worker: WorkerInfo
    tasks: tuple[tuple[Task, Progress | None], ...]


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, when it fires next, and its newest tasks that are on record, newest first."""

    schedule: Schedule
    upcoming: tuple[datetime, ...]
    last: tuple[Task, ...]


def parse_query(kind: type[Q], given: Sequence[tuple[str, str]]) -> Q:
    """The question that a query string asks. Fields of a form that were left empty say nothing."""
    fields = {name: text for name, text in given if text}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{error}") from None


async def list_tasks_page(state: AppState, question: TasksQuery) -> TaskPage:
    """A page of tasks."""
    now = state.clock.now()
    wanted = TaskFilter(
        status=question.status,
        queue=question.queue,
        func_path=question.function,
        prefix=question.id,
        since=_instant("since", question.since, now),
        until=_instant("until", question.until, now),
        metadata=_pairs(question.metadata),
    )
    return await state.once(
        question,
        lambda: find_tasks(state.storage, wanted, limit=question.limit, cursor=question.cursor),
    )


async def list_dead_page(state: AppState, question: DeadQuery) -> list[DeadLetter]:
    """A page of dead letters."""
    return await state.once(
        question,
        lambda: state.storage.list_dead(
            task_type=question.function,
            reason=question.reason,
            limit=question.limit,
            after=question.after,
        ),
    )


async def list_dead_groups(state: AppState) -> DeadGroups:
    """The dead letters by function and reason."""
    return await state.once("groups", lambda: dead_groups(state.storage))


async def list_workers(state: AppState) -> list[WorkerView]:
    """Every worker with what it runs."""

    async def ask() -> list[WorkerView]:
        return [
            WorkerView(worker=worker, tasks=await _running(state, worker))
            for worker in await live_workers(state.storage)
        ]

    return await state.once("workers", ask)


async def _running(state: AppState, worker: WorkerInfo) -> tuple[tuple[Task, Progress | None], ...]:
    held = []
    for task_id in worker.running[:_MOST_RUNNING]:
        task = await state.storage.get_task(task_id)
        if task is not None:
            held.append((task, await state.storage.get_progress(task_id)))
    return tuple(held)


async def list_schedules(state: AppState) -> list[ScheduleView]:
    """Every schedule with its next times."""

    async def ask() -> list[ScheduleView]:
        return [await _schedule(state, each) for each in await state.queue.schedules.list()]

    return await state.once("schedules", ask)


async def _schedule(state: AppState, schedule: Schedule) -> ScheduleView:
    return ScheduleView(
        schedule=schedule,
        upcoming=tuple(await state.queue.schedules.upcoming(schedule.id, 3)),
        last=await _last_tasks(state, schedule),
    )


async def _last_tasks(state: AppState, schedule: Schedule) -> tuple[Task, ...]:
    """The ids of its tasks begin alike and go on with the time, so they stand together."""
    last, following = schedule.last_at, schedule.next_at
    if last is None:
        return ()
    apart = following - last if following is not None and following > last else _A_DAY
    listed = await state.storage.list_tasks(
        after=task_id_at(schedule.id, last - apart * _LAST_TIMES), limit=_LAST_TIMES * 2
    )
    own = [task for task in listed if task.schedule_id == schedule.id]
    return tuple(reversed(own[-_LAST_TIMES:]))


async def known_functions(state: AppState) -> list[str]:
    """The functions of the tasks that were met lately, to choose from; bounded, asked rarely."""

    async def ask() -> list[str]:
        tasks = await newest_tasks(state.storage, _MOST_LEARNT)
        return sorted({task.func_path for task in tasks})

    return await state.once("functions", ask, fresh=_LEARNT_SECONDS)


def task_json(task: Task) -> dict[str, Any]:
    """A task as anybody may see it: secrets in its arguments are hidden."""
    safe = without_secrets(task)
    hidden = {name: plain(getattr(safe, name)) for name in ("args", "kwargs", "metadata")}
    shown: dict[str, Any] = plain(task)
    return {**shown, **hidden}


def dead_letter_json(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter without its checkpoint, which is the task's own."""
    shown: dict[str, Any] = plain(msgspec.structs.replace(letter, checkpoint=None))
    del shown["checkpoint"]
    return shown


def detail_json(detail: TaskDetail) -> dict[str, Any]:
    """All that is known of a task, as anybody may see it."""
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
    """A schedule as anybody may see it."""
    shown: dict[str, Any] = plain(view.schedule)
    return {
        **shown,
        "task": task_json(view.schedule.task),
        "upcoming": plain(view.upcoming),
        "last": [task_json(task) for task in view.last],
    }


def worker_json(view: WorkerView) -> dict[str, Any]:
    """A worker as anybody may see it."""
    shown: dict[str, Any] = plain(view.worker)
    tasks = [{"task": task_json(task), "progress": plain(how)} for task, how in view.tasks]
    return {**shown, "tasks": tasks}


def _instant(name: str, text: str | None, now: datetime) -> datetime | None:
    """An instant, given as one or as how long ago it was."""
    if text is None:
        return None
    if found := _SPAN.fullmatch(text.strip()):
        return now - timedelta(seconds=min(int(found[1]) * _UNITS[found[2]], _LONGEST_SPAN))
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
    return {name.strip(): value.strip()}
