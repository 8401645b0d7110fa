"""What an operator can do: each action once, for the forms of the pages and for the API alike."""

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

MOST_IDS = 500
_MOST_AT_ONCE = 10_000

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Ids = Annotated[list[Id], Meta(min_length=1, max_length=MOST_IDS)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]
Zoned = Annotated[datetime, Meta(tz=True)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an action is told."""

    @property
    def subject(self) -> str:
        """What it is about, for the audit line: names and ids, never arguments."""
        told = [getattr(self, name, None) for name in ("id", "queue", "function", "reason", "ids")]
        return " ".join(_named(each) for each in told if each)


class Some(Request, frozen=True, kw_only=True):
    """Certain tasks."""

    ids: Ids


class Retried(Some, frozen=True, kw_only=True):
    """Certain dead letters; `from_start` forgets the steps that were done."""

    from_start: bool = False


class Edited(Request, frozen=True, kw_only=True):
    """A dead letter and the arguments it shall run with; `[redacted]` stands for what was there."""

    id: Id
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    from_start: bool = False


class Group(Request, frozen=True, kw_only=True):
    """All dead letters of a function that died for one reason."""

    function: Text
    reason: Text


class OfQueue(Request, frozen=True, kw_only=True):
    """A queue."""

    queue: Id


class Purge(OfQueue, frozen=True, kw_only=True):
    """A queue, and its name again: nobody does this by mistake."""

    confirm: str


class OfWorker(Request, frozen=True, kw_only=True):
    """A worker."""

    id: Id


class OfSchedule(Request, frozen=True, kw_only=True):
    """A schedule."""

    id: Id


class Backfill(OfSchedule, frozen=True, kw_only=True):
    """A schedule and the window whose times it has missed."""

    start: Zoned
    end: Zoned


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: in words, how many, and why others were refused (id to reason)."""

    message: str
    done: int = 1
    refused: dict[str, str] = {}


class Action(msgspec.Struct, frozen=True):
    """Something that can be done. `path` names it in both faces."""

    path: str
    summary: str
    takes: type[Request]
    act: Callable[[AppState, Any], Awaitable[Done]]


async def retry(state: AppState, told: Retried) -> Done:
    report = await bulk_actions.retry_dead(state.storage, told.ids, from_start=told.from_start)
    return _reported(report, "put back in the queue")


async def cancel(state: AppState, told: Some) -> Done:
    report = await bulk_actions.cancel_tasks(state.storage, told.ids, reason="by an operator")
    return _reported(report, "cancelled")


async def delete(state: AppState, told: Some) -> Done:
    return _reported(await bulk_actions.delete_tasks(state.storage, told.ids), "deleted")


async def retry_edited(state: AppState, told: Edited) -> Done:
    task = await state.storage.get_dead_task(told.id)
    if task is None:
        raise TaskNotFound(told.id)
    args = None if told.args is None else restored(told.args, task.args)
    kwargs = None if told.kwargs is None else restored(told.kwargs, task.kwargs)
    if not await state.queue.dead.retry(
        told.id, args=args, kwargs=kwargs, from_start=told.from_start
    ):
        raise TaskNotFound(told.id)
    return Done(message="1 task put back in the queue")


async def retry_group(state: AppState, told: Group) -> Done:
    report = await bulk_actions.retry_dead(state.storage, await _of_group(state, told))
    return _reported(report, "put back in the queue")


async def delete_group(state: AppState, told: Group) -> Done:
    return _reported(
        await bulk_actions.delete_dead(state.storage, await _of_group(state, told)), "deleted"
    )


async def pause_queue(state: AppState, told: OfQueue) -> Done:
    await state.storage.pause_queue(told.queue)
    return Done(message=f"queue {told.queue} is paused")


async def resume_queue(state: AppState, told: OfQueue) -> Done:
    await state.storage.resume_queue(told.queue)
    return Done(message=f"queue {told.queue} hands out tasks again")


async def purge_queue(state: AppState, told: Purge) -> Done:
    """Cancel what waits in the queue; what runs goes on."""
    check_name("queue", told.queue, error=InvalidValue)
    if told.confirm != told.queue:
        raise InvalidValue(f"to purge the queue {told.queue}, write its name once more")
    ids: list[str] = []
    for status in (TaskStatus.PENDING, TaskStatus.RETRYING):
        tasks = await state.storage.list_tasks(
            status=status, queue=told.queue, limit=_MOST_AT_ONCE - len(ids)
        )
        ids += [task.id for task in tasks]
    report = await bulk_actions.cancel_tasks(state.storage, ids, reason="the queue was purged")
    done = _reported(report, "cancelled")
    if len(ids) == _MOST_AT_ONCE:
        return msgspec.structs.replace(done, message=f"{done.message}; there may be more")
    return done


async def pause_worker(state: AppState, told: OfWorker) -> Done:
    if not await state.storage.pause_worker(told.id):
        raise InvalidValue(f"worker {told.id}: none with that id is alive")
    return Done(message=f"worker {told.id} claims nothing more; what it runs goes on")


async def resume_worker(state: AppState, told: OfWorker) -> Done:
    if not await state.storage.resume_worker(told.id):
        raise InvalidValue(f"worker {told.id}: none with that id is alive")
    return Done(message=f"worker {told.id} claims again")


async def pause_schedule(state: AppState, told: OfSchedule) -> Done:
    await state.queue.schedules.pause(told.id)
    return Done(message=f"schedule {told.id} is paused")


async def resume_schedule(state: AppState, told: OfSchedule) -> Done:
    await state.queue.schedules.resume(told.id)
    return Done(message=f"schedule {told.id} goes on")


async def trigger_schedule(state: AppState, told: OfSchedule) -> Done:
    handle = await state.queue.schedules.trigger(told.id)
    return Done(message=f"enqueued task {handle.id}")


async def backfill_schedule(state: AppState, told: Backfill) -> Done:
    for name, instant in (("start", told.start), ("end", told.end)):
        if not 1970 < instant.year < 9000:
            raise InvalidValue(f"{name}: expected a year after 1970 and before 9000")
    if await state.storage.get_schedule(told.id) is None:
        raise ScheduleNotFound(told.id)
    handles = await state.queue.schedules.backfill(
        told.id, told.start.astimezone(UTC), told.end.astimezone(UTC)
    )
    return Done(message=f"{count_of(len(handles), 'task')} enqueued", done=len(handles))


ACTIONS = {
    action.path: action
    for action in (
        Action("tasks/retry", "Run dead tasks again under their ids", Retried, retry),
        Action("tasks/retry-edited", "Run one again with other arguments", Edited, retry_edited),
        Action("tasks/cancel", "Cancel tasks that wait or run", Some, cancel),
        Action("tasks/delete", "Forget tasks that have ended, and dead letters", Some, delete),
        Action("dead/retry", "Run all of a group of dead letters again", Group, retry_group),
        Action("dead/delete", "Forget all of a group of dead letters", Group, delete_group),
        Action("queues/pause", "Hand out nothing more from a queue", OfQueue, pause_queue),
        Action("queues/resume", "Hand out tasks of a queue again", OfQueue, resume_queue),
        Action("queues/purge", "Cancel everything that waits in a queue", Purge, purge_queue),
        Action("workers/pause", "Have one worker claim nothing more", OfWorker, pause_worker),
        Action("workers/resume", "Let a paused worker claim again", OfWorker, resume_worker),
        Action("schedules/pause", "Fire a schedule no more", OfSchedule, pause_schedule),
        Action("schedules/resume", "Fire a schedule again", OfSchedule, resume_schedule),
        Action("schedules/trigger", "Enqueue its task now", OfSchedule, trigger_schedule),
        Action("schedules/backfill", "Make up for missed times", Backfill, backfill_schedule),
    )
}


def parse_json(action: Action, body: bytes) -> Request:
    """What a program tells an action."""
    try:
        return msgspec.json.decode(body, type=action.takes)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{action.path}: {error}") from None


def parse_form(action: Action, fields: Iterable[tuple[str, str]]) -> Request:
    """What the form of a page tells an action: many ids, arguments as JSON, times in UTC."""
    known = {field.name for field in msgspec.structs.fields(action.takes)}
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
        return msgspec.convert(values, action.takes, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{action.path}: {error}") from None


async def perform(state: AppState, action: Action, told: Request) -> Done:
    """Do it; whatever was seen before is out of date from now on."""
    try:
        return await action.act(state, told)
    finally:
        state.forget()


def outcome_of(error: OmniqError) -> str:
    """How an audit line names a refusal: by its kind, since the words may quote arguments."""
    return f"refused ({type(error).__name__})"


async def _of_group(state: AppState, group: Group) -> list[str]:
    ids = await bulk_actions.dead_ids(state.storage, task_type=group.function, reason=group.reason)
    return ids[:_MOST_AT_ONCE]


def _reported(report: bulk_actions.BulkReport, verb: str) -> Done:
    message = f"{count_of(report.done, 'task')} {verb}"
    if report.refused:
        why = next(iter(report.refused.values()))
        message += f"; {count_of(len(report.refused), 'other')} not: {why}"
    return Done(message=message, done=report.done, refused=report.refused)


def _named(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value[:5]) + (f" and {len(value) - 5} more" if len(value) > 5 else "")
    return str(value)


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{name}: not JSON: {error}") from None
