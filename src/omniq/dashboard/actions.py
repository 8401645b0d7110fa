"""The actions of an operator. The forms of the pages and the JSON API share each definition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omniq.dashboard.app_state import AppState
from omniq.errors import InvalidValue, OmniqError, ScheduleNotFound, TaskNotFound
from omniq.models import TaskStatus, check_name
from omniq.operations import bulk_actions
from omniq.operations.formatting import count_of
from omniq.operations.redaction import restored

MAX_IDS = 500
_MAX_TASKS = 10_000

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Ids = Annotated[list[Id], Meta(min_length=1, max_length=MAX_IDS)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]
Zoned = Annotated[datetime, Meta(tz=True)]


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of an action."""

    @property
    def subject(self) -> str:
        """What the action changes, for the audit event: names and ids, never arguments."""
        names = ("id", "queue", "function", "reason", "ids")
        values = [getattr(self, name, None) for name in names]
        return " ".join(_shortened(value) for value in values if value)


class TaskIds(ActionRequest, frozen=True, kw_only=True):
    """Tasks, by id."""

    ids: Ids


class RetryTasks(TaskIds, frozen=True, kw_only=True):
    """Dead letters, by id. `from_start` discards the results of completed steps."""

    from_start: bool = False


class RetryEdited(ActionRequest, frozen=True, kw_only=True):
    """A dead letter and its new arguments. `[redacted]` means the value that is stored."""

    id: Id
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    from_start: bool = False


class DeadGroup(ActionRequest, frozen=True, kw_only=True):
    """All dead letters of one function with one failure reason."""

    function: Text
    reason: Text


class QueueName(ActionRequest, frozen=True, kw_only=True):
    """A queue."""

    queue: Id


class PurgeQueue(QueueName, frozen=True, kw_only=True):
    """A queue, and its name a second time to prevent a purge by mistake."""

    confirm: str


class WorkerId(ActionRequest, frozen=True, kw_only=True):
    """A worker."""

    id: Id


class ScheduleId(ActionRequest, frozen=True, kw_only=True):
    """A schedule."""

    id: Id


class BackfillSchedule(ScheduleId, frozen=True, kw_only=True):
    """A schedule and the time range whose missed times to run."""

    start: Zoned
    end: Zoned


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A message for people, the number of changes, and why others were refused (id to reason)."""

    message: str
    done: int = 1
    refused: dict[str, str] = {}


class Action(msgspec.Struct, frozen=True):
    """An action. `path` is its path below `/api` and below `/act`."""

    path: str
    summary: str
    request_type: type[ActionRequest]
    handler: Callable[[AppState, Any], Awaitable[ActionResult]]


async def retry(state: AppState, request: RetryTasks) -> ActionResult:
    report = await bulk_actions.retry_dead(
        state.storage, request.ids, from_start=request.from_start
    )
    return _result_of(report, "retried")


async def cancel(state: AppState, request: TaskIds) -> ActionResult:
    report = await bulk_actions.cancel_tasks(state.storage, request.ids, reason="by an operator")
    return _result_of(report, "cancelled")


async def delete(state: AppState, request: TaskIds) -> ActionResult:
    return _result_of(await bulk_actions.delete_tasks(state.storage, request.ids), "deleted")


async def retry_edited(state: AppState, request: RetryEdited) -> ActionResult:
    task = await state.storage.get_dead_task(request.id)
    if task is None:
        raise TaskNotFound(request.id)
    args = None if request.args is None else restored(request.args, task.args)
    kwargs = None if request.kwargs is None else restored(request.kwargs, task.kwargs)
    if not await state.queue.dead.retry(
        request.id, args=args, kwargs=kwargs, from_start=request.from_start
    ):
        raise TaskNotFound(request.id)
    return ActionResult(message="1 task retried")


async def retry_group(state: AppState, request: DeadGroup) -> ActionResult:
    ids = await _ids_of_group(state, request)
    return _result_of(await bulk_actions.retry_dead(state.storage, ids), "retried")


async def delete_group(state: AppState, request: DeadGroup) -> ActionResult:
    ids = await _ids_of_group(state, request)
    return _result_of(await bulk_actions.delete_dead(state.storage, ids), "deleted")


async def pause_queue(state: AppState, request: QueueName) -> ActionResult:
    await state.storage.pause_queue(request.queue)
    return ActionResult(message=f"Queue {request.queue} paused")


async def resume_queue(state: AppState, request: QueueName) -> ActionResult:
    await state.storage.resume_queue(request.queue)
    return ActionResult(message=f"Queue {request.queue} resumed")


async def purge_queue(state: AppState, request: PurgeQueue) -> ActionResult:
    """Cancel the waiting tasks of the queue. Running tasks continue."""
    check_name("queue", request.queue, error=InvalidValue)
    if request.confirm != request.queue:
        raise InvalidValue(f"to purge the queue {request.queue}, enter its name in confirm")
    ids: list[str] = []
    for status in (TaskStatus.PENDING, TaskStatus.RETRYING):
        tasks = await state.storage.list_tasks(
            status=status, queue=request.queue, limit=_MAX_TASKS - len(ids)
        )
        ids += [task.id for task in tasks]
    report = await bulk_actions.cancel_tasks(state.storage, ids, reason="the queue was purged")
    result = _result_of(report, "cancelled")
    if len(ids) == _MAX_TASKS:
        return msgspec.structs.replace(result, message=f"{result.message}; there may be more")
    return result


async def pause_worker(state: AppState, request: WorkerId) -> ActionResult:
    if not await state.storage.pause_worker(request.id):
        raise _no_live_worker(request.id)
    message = f"Worker {request.id} paused: it finishes its running tasks and claims no new ones"
    return ActionResult(message=message)


async def resume_worker(state: AppState, request: WorkerId) -> ActionResult:
    if not await state.storage.resume_worker(request.id):
        raise _no_live_worker(request.id)
    return ActionResult(message=f"Worker {request.id} resumed")


async def pause_schedule(state: AppState, request: ScheduleId) -> ActionResult:
    await state.queue.schedules.pause(request.id)
    return ActionResult(message=f"Schedule {request.id} paused")


async def resume_schedule(state: AppState, request: ScheduleId) -> ActionResult:
    await state.queue.schedules.resume(request.id)
    return ActionResult(message=f"Schedule {request.id} resumed")


async def trigger_schedule(state: AppState, request: ScheduleId) -> ActionResult:
    handle = await state.queue.schedules.trigger(request.id)
    return ActionResult(message=f"Task {handle.id} enqueued")


async def backfill_schedule(state: AppState, request: BackfillSchedule) -> ActionResult:
    for name, instant in (("start", request.start), ("end", request.end)):
        if not 1970 < instant.year < 9000:
            raise InvalidValue(f"{name}: expected a year after 1970 and before 9000")
    if await state.storage.get_schedule(request.id) is None:
        raise ScheduleNotFound(request.id)
    handles = await state.queue.schedules.backfill(
        request.id, request.start.astimezone(UTC), request.end.astimezone(UTC)
    )
    return ActionResult(message=f"{count_of(len(handles), 'task')} enqueued", done=len(handles))


ACTIONS = {
    action.path: action
    for action in (
        Action("tasks/retry", "Retry dead tasks under the same ids", RetryTasks, retry),
        Action(
            "tasks/retry-edited", "Retry a dead task with new arguments", RetryEdited, retry_edited
        ),
        Action("tasks/cancel", "Cancel waiting or running tasks", TaskIds, cancel),
        Action("tasks/delete", "Delete ended tasks and their dead letters", TaskIds, delete),
        Action("dead/retry", "Retry a group of dead letters", DeadGroup, retry_group),
        Action("dead/delete", "Delete a group of dead letters", DeadGroup, delete_group),
        Action("queues/pause", "Pause a queue", QueueName, pause_queue),
        Action("queues/resume", "Resume a queue", QueueName, resume_queue),
        Action("queues/purge", "Cancel all waiting tasks of a queue", PurgeQueue, purge_queue),
        Action("workers/pause", "Pause a worker: it claims no new tasks", WorkerId, pause_worker),
        Action("workers/resume", "Resume a paused worker", WorkerId, resume_worker),
        Action("schedules/pause", "Pause a schedule", ScheduleId, pause_schedule),
        Action("schedules/resume", "Resume a paused schedule", ScheduleId, resume_schedule),
        Action("schedules/trigger", "Enqueue a schedule's task now", ScheduleId, trigger_schedule),
        Action(
            "schedules/backfill",
            "Enqueue tasks for the missed times of a schedule",
            BackfillSchedule,
            backfill_schedule,
        ),
    )
}


def parse_json(action: Action, body: bytes) -> ActionRequest:
    """The request in a JSON body."""
    try:
        return msgspec.json.decode(body, type=action.request_type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{action.path}: {error}") from None


def parse_form(action: Action, fields: Iterable[tuple[str, str]]) -> ActionRequest:
    """The request in a submitted form: repeated `ids`, arguments as JSON, times in UTC."""
    known = {field.name for field in msgspec.structs.fields(action.request_type)}
    values: dict[str, Any] = {}
    for name, text in fields:
        if name not in known or not text:
            continue
        if name == "ids":
            values.setdefault("ids", []).append(text)
        elif name in ("args", "kwargs"):
            values[name] = _json(name, text)
        elif name in ("start", "end"):
            values[name] = text if text.endswith("Z") or "+" in text else f"{text}Z"
        else:
            values[name] = text
    try:
        return msgspec.convert(values, action.request_type, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{action.path}: {error}") from None


async def perform(state: AppState, action: Action, request: ActionRequest) -> ActionResult:
    """Perform the action, then invalidate all cached reads, also when it failed."""
    try:
        return await action.handler(state, request)
    finally:
        state.invalidate()


def outcome_of(error: OmniqError) -> str:
    """The outcome in the audit event: the error's type, because its message may quote arguments."""
    return f"refused ({type(error).__name__})"


async def _ids_of_group(state: AppState, group: DeadGroup) -> list[str]:
    ids = await bulk_actions.dead_ids(state.storage, func_path=group.function, reason=group.reason)
    return ids[:_MAX_TASKS]


def _no_live_worker(worker_id: str) -> InvalidValue:
    return InvalidValue(f"worker {worker_id}: no live worker has this id")


def _result_of(report: bulk_actions.BulkReport, verb: str) -> ActionResult:
    message = f"{count_of(report.done, 'task')} {verb}"
    if report.refused:
        why = next(iter(report.refused.values()))
        if report.done:
            message += f"; {count_of(len(report.refused), 'task')} not {verb}: {why}"
        else:
            message = f"Nothing {verb}: {why}"
    return ActionResult(message=message, done=report.done, refused=report.refused)


def _shortened(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value[:5]) + (f" and {len(value) - 5} more" if len(value) > 5 else "")
    return str(value)


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{name}: not JSON: {error}") from None
