"""Query parameters as data, and the reads that the pages and the API share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from omniq.dashboard.app_state import AppState
from omniq.dashboard.endings import Ending
from omniq.errors import InvalidValue
from omniq.models import DeadLetter, Progress, Schedule, Task, TaskStatus, WorkerInfo
from omniq.operations.health import live_workers
from omniq.operations.newest import newest_tasks
from omniq.operations.redaction import redacted, without_secrets
from omniq.operations.run_history import DEFAULT_RANGE, History, range_of, run_history
from omniq.operations.search_query import TaskSearch, instant_of, parse_search, quoted
from omniq.operations.task_detail import TaskDetail
from omniq.scheduling.due_times import task_id_at
from omniq.storage.base import BaseStorage
from omniq.storage.types import WorkerRequest
from omniq.text.masking import is_secret_name
from omniq.text.to_json import plain

MAX_LIMIT = 500
_MAX_RUNNING = 20
_SAMPLED_TASKS = 300
_LAST_TIMES = 5
_DAY = timedelta(days=1)
_MAX_SCANNED = 2_000
_MAX_ARGUMENTS, _MAX_ARGUMENT = 120, 40
_HISTORY_MAX_AGE = 15.0

Q = TypeVar("Q", bound=msgspec.Struct)

Text = Annotated[str, Meta(max_length=512)]
When = Annotated[
    str, Meta(max_length=64, description="an instant with its time zone, or an age: 15m, 2h, 7d")
]
Size = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class TasksQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks to list. `q` is a search such as `fn:charge arg.order:17`; `id` is a prefix, `metadata` name=value."""

    q: Text = ""
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
    """Which dead letters to list, latest failure first. `group` is the id of a group, `error` a part of the text."""

    group: Text | None = None
    error: Text = ""

    function: Text | None = None
    type: Text | None = None
    reason: Text | None = None
    sort: Text = ""
    limit: Size = 50
    after: Text | None = None


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of the history: 15m, 1h, 6h, 24h, 3d, 7d or 30d."""

    range: Text = DEFAULT_RANGE
    sort: Text = "runs"
    function: Text | None = None
    queue: Text | None = None
    worker: Text | None = None


class SortQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order of a table."""

    sort: Text = ""


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of operator actions."""

    after: Text = ""
    limit: Size = 100


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No query parameters."""


_REQUEST_TEXTS = {
    "stop": "asked to stop",
    "restart": "asked to restart",
    "ping": "asked for its functions",
}


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with its running tasks; the first 20 if there are more. `requests` it has not read yet."""

    worker: WorkerInfo
    tasks: tuple[tuple[Task, Progress | None], ...]
    requests: tuple[str, ...] = ()


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


def search_of(state: AppState, query: TasksQuery) -> TaskSearch:
    """The search that the parameters describe, together with `q`."""
    now = state.clock.now()
    given = {
        "status": query.status,
        "queue": query.queue,
        "func_path": query.function,
        "prefix": query.id,
        "since": None if query.since is None else instant_of("since", query.since, now),
        "until": None if query.until is None else instant_of("until", query.until, now),
        "metadata": _pairs(query.metadata),
    }
    search = parse_search(query.q, now)
    return msgspec.structs.replace(search, **{name: each for name, each in given.items() if each})


async def list_workers(state: AppState) -> list[WorkerView]:
    """Every live worker with its running tasks, in four reads for any number of tasks."""

    async def read() -> list[WorkerView]:
        workers = await live_workers(state.storage)
        shown = [task_id for worker in workers for task_id in worker.running[:_MAX_RUNNING]]
        tasks = await _tasks(state.storage, shown)
        progress = await state.storage.progress_of(shown)
        requests = await state.storage.pending_requests()
        return [
            WorkerView(
                worker=worker,
                tasks=tuple(
                    (tasks[task_id], progress.get(task_id))
                    for task_id in worker.running[:_MAX_RUNNING]
                    if task_id in tasks
                ),
                requests=tuple(_request_text(each) for each in requests if each.owner == worker.id),
            )
            for worker in workers
        ]

    return await state.cached("workers", read)


def _request_text(request: WorkerRequest) -> str:
    """What an operator has asked the worker for."""
    return _REQUEST_TEXTS.get(request.action) or f"asked to run {request.slots} tasks at a time"


async def _tasks(storage: BaseStorage, ids: Sequence[str]) -> dict[str, Task]:
    """The running tasks with these ids; from one scan, unless there are very many."""
    scan = await storage.scan_tasks(status=TaskStatus.RUNNING, limit=_MAX_SCANNED)
    return {task.id: task for task in scan.tasks if task.id in set(ids)}


async def list_schedules(state: AppState) -> list[ScheduleView]:
    """Every schedule with its next times and last tasks."""

    async def read() -> list[ScheduleView]:
        schedules = await state.queue.schedules.list()
        recent = await newest_tasks(state.storage, _SAMPLED_TASKS) if schedules else []
        return [await _schedule(state, each, recent) for each in schedules]

    return await state.cached("schedules", read)


async def _schedule(state: AppState, schedule: Schedule, recent: Sequence[Task]) -> ScheduleView:
    return ScheduleView(
        schedule=schedule,
        upcoming=tuple(await state.queue.schedules.upcoming(schedule.id, 3)),
        last=await _last_tasks(state, schedule, recent),
    )


async def _last_tasks(
    state: AppState, schedule: Schedule, recent: Sequence[Task]
) -> tuple[Task, ...]:
    """The newest tasks of the schedule.

    Their ids start with the schedule's id, followed by the time, so they are adjacent in the order
    of ids.
    """
    last, following = schedule.last_at, schedule.next_at
    own: list[Task] = []
    if last is not None:
        interval = following - last if following is not None and following > last else _DAY
        listed = await state.storage.list_tasks(
            after=task_id_at(schedule.id, last - interval * _LAST_TIMES), limit=_LAST_TIMES * 2
        )
        own = [task for task in listed if task.schedule_id == schedule.id]
    # A run that was triggered by hand has an id like any other task.
    triggered = [task for task in recent if task.schedule_id == schedule.id]
    known = {task.id: task for task in [*own, *triggered]}
    return tuple(sorted(known.values(), key=_time_of, reverse=True)[:_LAST_TIMES])


def _time_of(task: Task) -> datetime:
    return task.eta or task.created_at


def search_text(query: TasksQuery) -> str:
    """The conditions except the status, as a search text."""
    named = {
        "queue": query.queue,
        "fn": query.function,
        "id": query.id,
        "since": query.since,
        "until": query.until,
    }
    terms = [f"{name}:{quoted(text)}" for name, text in named.items() if text]
    if query.metadata:
        name, _, value = query.metadata.partition("=")
        terms.append(f"meta.{name.strip()}:{quoted(value.strip())}")
    return " ".join([query.q, *terms]).strip()


class TaskRow(msgspec.Struct, frozen=True):
    """A task in a list: its arguments on one line, without secrets, and how it ended."""

    task: Task
    arguments: str
    ending: Ending


def task_row(task: Task, ending: Ending | None) -> TaskRow:
    """The task with its arguments as a short text."""
    ending = ending or Ending()
    if not task.is_verified:
        return TaskRow(task, "", ending)
    safe = without_secrets(task)
    parts = [_short(value) for value in safe.args]
    parts += [f"{name}={_short(value)}" for name, value in safe.kwargs.items()]
    text = ", ".join(parts)
    text = text if len(text) <= _MAX_ARGUMENTS else f"{text[:_MAX_ARGUMENTS]}…"
    return TaskRow(task, text, ending)


def _short(value: Any) -> str:
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= _MAX_ARGUMENT else f"{text[:_MAX_ARGUMENT]}…"


async def history_of(state: AppState, span: str, **chosen: Any) -> History:
    """The history of a range, cached until a minute may have been added."""

    async def read() -> History:
        async with state.searches.use() as storage:
            return await run_history(storage, range_of(span), **chosen)

    key = ("history", span, *sorted(chosen.items()))
    return await state.cached(key, read, max_age=_HISTORY_MAX_AGE)


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
    return {**shown, "tasks": tasks, "requests": list(view.requests)}


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
