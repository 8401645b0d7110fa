"""What can be asked, as data: checked once, answered from one place for pages and programs alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from omniq.dashboard.app_state import Desk
from omniq.errors import InvalidTask
from omniq.models import DeadLetter, Progress, Schedule, Task, TaskStatus, WorkerInfo
from omniq.operations.dead_groups import DeadGroups, dead_groups
from omniq.operations.find_tasks import TaskFilter, TaskPage, browse
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


class TasksQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class DeadQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


def asked(kind: type[Q], given: Sequence[tuple[str, str]]) -> Q:
    """The question that a query string asks. Fields of a form that were left empty say nothing."""
    fields = {name: text for name, text in given if text}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidTask(f"{error}") from None


async def answer_tasks(desk: Desk, question: TasksQuestion) -> TaskPage:
    """A page of tasks."""
    now = desk.clock.now()
    wanted = TaskFilter(
        status=question.status,
        queue=question.queue,
        func_path=question.function,
        prefix=question.id,
        since=_instant("since", question.since, now),
        until=_instant("until", question.until, now),
        metadata=_pairs(question.metadata),
    )
    return await desk.once(
        question,
        lambda: browse(desk.storage, wanted, limit=question.limit, cursor=question.cursor),
    )


async def answer_dead(desk: Desk, question: DeadQuestion) -> list[DeadLetter]:
    """A page of dead letters."""
    return await desk.once(
        question,
        lambda: desk.storage.list_dead(
            task_type=question.function,
            reason=question.reason,
            limit=question.limit,
            after=question.after,
        ),
    )


async def answer_groups(desk: Desk) -> DeadGroups:
    """The dead letters by function and reason."""
    return await desk.once("groups", lambda: dead_groups(desk.storage))


async def answer_workers(desk: Desk) -> list[WorkerView]:
    """Every worker with what it runs."""

    async def ask() -> list[WorkerView]:
        return [
            WorkerView(worker=worker, tasks=await _running(desk, worker))
            for worker in await live_workers(desk.storage)
        ]

    return await desk.once("workers", ask)


async def _running(desk: Desk, worker: WorkerInfo) -> tuple[tuple[Task, Progress | None], ...]:
    held = []
    for task_id in worker.running[:_MOST_RUNNING]:
        task = await desk.storage.get_task(task_id)
        if task is not None:
            held.append((task, await desk.storage.get_progress(task_id)))
    return tuple(held)


async def answer_schedules(desk: Desk) -> list[ScheduleView]:
    """Every schedule with its next times."""

    async def ask() -> list[ScheduleView]:
        return [await _schedule(desk, each) for each in await desk.queue.schedules.list()]

    return await desk.once("schedules", ask)


async def _schedule(desk: Desk, schedule: Schedule) -> ScheduleView:
    return ScheduleView(
        schedule=schedule,
        upcoming=tuple(await desk.queue.schedules.upcoming(schedule.id, 3)),
        last=await _last_tasks(desk, schedule),
    )


async def _last_tasks(desk: Desk, schedule: Schedule) -> tuple[Task, ...]:
    """The ids of its tasks begin alike and go on with the time, so they stand together."""
    last, following = schedule.last_at, schedule.next_at
    if last is None:
        return ()
    apart = following - last if following is not None and following > last else _A_DAY
    listed = await desk.storage.list_tasks(
        after=task_id_at(schedule.id, last - apart * _LAST_TIMES), limit=_LAST_TIMES * 2
    )
    own = [task for task in listed if task.schedule_id == schedule.id]
    return tuple(reversed(own[-_LAST_TIMES:]))


async def learnt_functions(desk: Desk) -> list[str]:
    """The functions of the tasks that were met lately, to choose from; bounded, asked rarely."""

    async def ask() -> list[str]:
        tasks = await newest_tasks(desk.storage, _MOST_LEARNT)
        return sorted({task.func_path for task in tasks})

    return await desk.once("functions", ask, fresh=_LEARNT_SECONDS)


def shown_task(task: Task) -> dict[str, Any]:
    """A task as anybody may see it: secrets in its arguments are hidden."""
    safe = without_secrets(task)
    hidden = {name: plain(getattr(safe, name)) for name in ("args", "kwargs", "metadata")}
    shown: dict[str, Any] = plain(task)
    return {**shown, **hidden}


def shown_letter(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter without its checkpoint, which is the task's own."""
    shown: dict[str, Any] = plain(msgspec.structs.replace(letter, checkpoint=None))
    del shown["checkpoint"]
    return shown


def shown_detail(detail: TaskDetail) -> dict[str, Any]:
    """All that is known of a task, as anybody may see it."""
    shown: dict[str, Any] = plain(msgspec.structs.replace(detail, dead=None))
    shown["task"] = shown_task(detail.task)
    shown["steps"] = [
        {"name": step.name, "result": plain(redacted(step.result))} for step in detail.steps
    ]
    if detail.result is not None:
        shown["result"]["result"] = plain(redacted(detail.result.result))
    shown["dead"] = None if detail.dead is None else shown_letter(detail.dead)
    return shown


def shown_schedule(view: ScheduleView) -> dict[str, Any]:
    """A schedule as anybody may see it."""
    shown: dict[str, Any] = plain(view.schedule)
    return {
        **shown,
        "task": shown_task(view.schedule.task),
        "upcoming": plain(view.upcoming),
        "last": [shown_task(task) for task in view.last],
    }


def shown_worker(view: WorkerView) -> dict[str, Any]:
    """A worker as anybody may see it."""
    shown: dict[str, Any] = plain(view.worker)
    tasks = [{"task": shown_task(task), "progress": plain(how)} for task, how in view.tasks]
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
        raise InvalidTask(
            f"{name} {text}: expected an instant such as 2026-01-31T12:00Z, or 15m, 2h, 7d"
        ) from None
    return _bounded(name, instant.replace(tzinfo=instant.tzinfo or UTC))


def _bounded(name: str, instant: datetime) -> datetime:
    if not 1970 < instant.year < 9000:
        raise InvalidTask(f"{name}: expected a year after 1970 and before 9000")
    return instant


def _pairs(text: str) -> dict[str, str]:
    if not text:
        return {}
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidTask(f"metadata {text}: expected name=value")
    return {name.strip(): value.strip()}
