"""The actions of an operator. The forms of the pages and the JSON API share each definition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC
from typing import Any

import msgspec

from omniq.dashboard import bulk_jobs, fleet_actions, queries
from omniq.dashboard.action_requests import (
    ActionRequest,
    ActionResult,
    AddNote,
    BackfillSchedule,
    BreakerName,
    BulkDead,
    BulkTasks,
    ChangeTask,
    EnqueueTask,
    FlowId,
    FunctionName,
    GroupId,
    HoldLimit,
    JobId,
    LimitKey,
    MuteGroup,
    PauseFunction,
    PauseQueue,
    PurgeQueue,
    PutSchedule,
    QueueName,
    RetryEdited,
    RetryFlow,
    RetryTasks,
    ScheduleId,
    SendEvent,
    SetLimit,
    SetSlots,
    TaskIds,
    WorkerId,
)
from omniq.dashboard.alerts import WEBHOOK_VARIABLE
from omniq.dashboard.app_state import AppState
from omniq.dashboard.jobs import Verb
from omniq.errors import InvalidValue, OmniqError, ScheduleNotFound, TaskNotFound
from omniq.models import TaskStatus, check_name
from omniq.operations import bulk_actions
from omniq.operations.formatting import count_of
from omniq.operations.redaction import restored
from omniq.operations.task_changes import change_task, enqueue_again
from omniq.tasks.durations import seconds_in

_MAX_TASKS = 10_000


class Action(msgspec.Struct, frozen=True):
    """An action. `path` is its path below `/api` and below `/act`.

    `is_entry`: its only effect is the entry in the audit log.
    """

    path: str
    summary: str
    request_type: type[ActionRequest]
    handler: Callable[[AppState, Any], Awaitable[ActionResult]]
    is_entry: bool = False


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


def bulk(verb: Verb) -> Callable[[AppState, Any], Awaitable[ActionResult]]:
    """The handler that starts a bulk change."""

    async def handle(state: AppState, request: BulkDead | BulkTasks) -> ActionResult:
        given = {
            name: value
            for name, value in msgspec.structs.asdict(request).items()
            if value and name != "note"
        }
        if not given:
            # A form without a condition is more likely a mistake than intended.
            raise InvalidValue(
                "give a search, a status or a group; without one, the change would apply to everything"
            )
        query: bulk_jobs.Query
        if isinstance(request, BulkDead):
            query = queries.DeadQuery(**given)
        else:
            query = queries.TasksQuery(**given)
            queries.search_of(state, query)
        subject = " ".join(f"{name}:{value}" for name, value in given.items())
        job = bulk_jobs.start(state, verb, query, subject)
        return ActionResult(message=f"Job {job.id} started", path=f"/jobs/{job.id}")

    return handle


async def stop_job(state: AppState, request: JobId) -> ActionResult:
    job = state.jobs.stop(request.id)
    return ActionResult(
        message=f"{count_of(job.done, 'task')} {job.word}; the others were not changed"
    )


async def run_now(state: AppState, request: TaskIds) -> ActionResult:
    return _result_of(await bulk_actions.run_now(state.storage, request.ids), "made due")


async def run_again(state: AppState, request: TaskIds) -> ActionResult:
    """Enqueue the same calls once more, as new tasks."""
    done, refused, last = 0, dict[str, str](), ""
    for task_id in request.ids:
        try:
            last = await enqueue_again(state.storage, task_id)
            done += 1
        except OmniqError as error:
            refused[task_id] = str(error)
    if done == 1 and not refused:
        return ActionResult(message=f"Task {last} enqueued")
    return _result_of(bulk_actions.BulkReport(done, refused), "enqueued again")


async def change(state: AppState, request: ChangeTask) -> ActionResult:
    task = await change_task(
        state.storage,
        request.id,
        priority=request.priority,
        queue=request.new_queue,
        eta=request.eta,
    )
    return ActionResult(message=f"Task {task.id} changed")


async def enqueue(state: AppState, request: EnqueueTask) -> ActionResult:
    options = {"queue": request.queue, "priority": request.priority, "eta": request.eta}
    given: Any = {name: value for name, value in options.items() if value is not None}
    handle = await state.queue.options(**given).enqueue(
        request.function, *request.args, **request.kwargs
    )
    return ActionResult(message=f"Task {handle.id} enqueued")


async def put_schedule(state: AppState, request: PutSchedule) -> ActionResult:
    if (request.cron is None) == (request.interval is None):
        raise InvalidValue("give either a cron expression or an interval")
    options = {
        "cron": request.cron,
        "tz": request.tz,
        "interval": None if request.interval is None else seconds_in(request.interval),
        "queue": request.queue,
    }
    given: Any = {name: value for name, value in options.items() if value is not None}
    before = await state.queue.schedules.get(request.id)
    args, kwargs = request.args, request.kwargs
    if before is not None:
        args, kwargs = restored(args, before.task.args), restored(kwargs, before.task.kwargs)
    await state.queue.schedules.add(
        request.id,
        request.function,
        args=tuple(args),
        kwargs=kwargs,
        missed=request.missed,
        overlap=request.overlap,
        **given,
    )
    return ActionResult(message=f"Schedule {request.id} stored")


async def delete_schedule(state: AppState, request: ScheduleId) -> ActionResult:
    if not await state.queue.schedules.delete(request.id):
        raise ScheduleNotFound(request.id)
    return ActionResult(message=f"Schedule {request.id} deleted")


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


async def cancel_flow(state: AppState, request: FlowId) -> ActionResult:
    if not await state.queue.flow(request.id).cancel():
        raise InvalidValue(f"flow {request.id}: it has ended, or does not exist")
    return ActionResult(message="1 flow cancelled")


async def retry_flow(state: AppState, request: RetryFlow) -> ActionResult:
    if not await state.queue.flow(request.id).retry(request.node):
        raise InvalidValue(f"flow {request.id}: it has already been retried")
    return ActionResult(message="1 flow retried")


async def send_event(state: AppState, request: SendEvent) -> ActionResult:
    value = request.value if request.text is None else request.text
    if not await state.queue.send_event(request.name, value, to=request.id):
        raise InvalidValue(f"event {request.name}: it already has a value, or the task has ended")
    return ActionResult(message=f"Event {request.name} sent")


async def mute_group(state: AppState, request: MuteGroup) -> ActionResult:
    return ActionResult(message=f"Group muted for {count_of(request.days, 'day')}")


async def unmute_group(state: AppState, request: GroupId) -> ActionResult:
    return ActionResult(message="Group no longer muted")


async def test_alerts(state: AppState, request: ActionRequest) -> ActionResult:
    if state.alerts is None:
        raise InvalidValue(f"no webhook: set {WEBHOOK_VARIABLE}")
    await state.alerts.test()
    return ActionResult(message=f"Test message posted to {state.alerts.host}")


async def add_note(state: AppState, request: AddNote) -> ActionResult:
    return ActionResult(message="Note added")


ACTIONS = {
    action.path: action
    for action in (
        Action("tasks/retry", "Retry dead tasks under the same ids", RetryTasks, retry),
        Action(
            "tasks/retry-edited", "Retry a dead task with new arguments", RetryEdited, retry_edited
        ),
        Action("tasks/cancel", "Cancel waiting or running tasks", TaskIds, cancel),
        Action("tasks/delete", "Delete ended tasks and their dead letters", TaskIds, delete),
        Action("tasks/run-now", "Make waiting tasks due now", TaskIds, run_now),
        Action("tasks/run-again", "Enqueue the same calls again", TaskIds, run_again),
        Action("tasks/change", "Change the priority, queue or eta of a task", ChangeTask, change),
        Action("tasks/enqueue", "Enqueue a task", EnqueueTask, enqueue),
        Action("bulk/retry", "Retry all tasks that match", BulkTasks, bulk("retry")),
        Action("bulk/cancel", "Cancel all tasks that match", BulkTasks, bulk("cancel")),
        Action("bulk/run-now", "Make all tasks that match due now", BulkTasks, bulk("run-now")),
        Action("bulk/delete", "Delete all ended tasks that match", BulkTasks, bulk("delete")),
        Action("dead/retry", "Retry all dead letters that match", BulkDead, bulk("retry-dead")),
        Action("dead/delete", "Delete all dead letters that match", BulkDead, bulk("delete-dead")),
        Action("dead/mute", "Mute a group of dead letters", MuteGroup, mute_group, True),
        Action("dead/unmute", "End the mute of a group", GroupId, unmute_group, True),
        Action("notes/add", "Add a note about a page", AddNote, add_note, True),
        Action("alerts/test", "Post a test message to the webhook", ActionRequest, test_alerts),
        Action("jobs/stop", "Stop a bulk change", JobId, stop_job),
        Action(
            "breakers/close", "Close a circuit breaker", BreakerName, fleet_actions.close_breaker
        ),
        Action("workers/stop", "Stop a worker", WorkerId, fleet_actions.stop_worker),
        Action("workers/restart", "Restart a worker", WorkerId, fleet_actions.restart_worker),
        Action(
            "limits/set",
            "Give a limit other numbers than its tasks say",
            SetLimit,
            fleet_actions.set_limit,
        ),
        Action(
            "limits/reset",
            "Have a limit admit what its tasks say",
            LimitKey,
            fleet_actions.reset_limit,
        ),
        Action("limits/hold", "Have a limit admit no task", HoldLimit, fleet_actions.hold_limit),
        Action(
            "limits/release",
            "Have a limit that is held admit tasks",
            LimitKey,
            fleet_actions.release_limit,
        ),
        Action(
            "workers/slots",
            "Change how many tasks a worker runs at a time",
            SetSlots,
            fleet_actions.set_slots,
        ),
        Action("schedules/put", "Add or replace a schedule", PutSchedule, put_schedule),
        Action("schedules/delete", "Delete a schedule", ScheduleId, delete_schedule),
        Action("flows/cancel", "Cancel a flow and all of its nodes", FlowId, cancel_flow),
        Action("flows/retry", "Run nodes of a flow again", RetryFlow, retry_flow),
        Action("events/send", "Send an event to the task that waits for it", SendEvent, send_event),
        Action("queues/pause", "Pause a queue", PauseQueue, fleet_actions.pause_queue),
        Action("queues/resume", "Resume a queue", QueueName, fleet_actions.resume_queue),
        Action(
            "functions/pause",
            "Pause a function in all queues",
            PauseFunction,
            fleet_actions.pause_function,
        ),
        Action(
            "functions/resume", "Resume a function", FunctionName, fleet_actions.resume_function
        ),
        Action("queues/purge", "Cancel all waiting tasks of a queue", PurgeQueue, purge_queue),
        Action(
            "workers/pause",
            "Pause a worker: it claims no new tasks",
            WorkerId,
            fleet_actions.pause_worker,
        ),
        Action("workers/resume", "Resume a paused worker", WorkerId, fleet_actions.resume_worker),
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
    known = {field.encode_name for field in msgspec.structs.fields(action.request_type)}
    values: dict[str, Any] = {}
    for name, text in fields:
        if name not in known or not text:
            continue
        if name == "ids":
            values.setdefault("ids", []).append(text)
        elif name in ("args", "kwargs", "value"):
            values[name] = _json(name, text)
        elif name in ("start", "end", "eta"):
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


def _result_of(report: bulk_actions.BulkReport, verb: str) -> ActionResult:
    message = f"{count_of(report.done, 'task')} {verb}"
    if report.refused:
        why = next(iter(report.refused.values()))
        if report.done:
            message += f"; {count_of(len(report.refused), 'task')} not {verb}: {why}"
        else:
            message = f"Nothing {verb}: {why}"
    return ActionResult(message=message, done=report.done, refused=report.refused)


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{name}: not JSON: {error}") from None
