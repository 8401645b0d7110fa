"""The parameters of the actions, as the forms and the JSON API send them, and their result."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omniq.dashboard.operator_notes import MAX_MUTED_DAYS, muted_subject
from omniq.models import TaskStatus

MAX_IDS = 500

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Ids = Annotated[list[Id], Meta(min_length=1, max_length=MAX_IDS)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]
Zoned = Annotated[datetime, Meta(tz=True)]


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of an action. `note` is stored in the audit log."""

    note: Annotated[str, Meta(max_length=500)] = ""

    @property
    def subject(self) -> str:
        """What the action changes, for the audit event: names and ids, never arguments."""
        names = ("id", "name", "key", "queue", "function", "reason", "group", "status", "ids")
        values = [getattr(self, name, None) for name in names]
        return " ".join(_shortened(value) for value in values if value)

    @property
    def remark(self) -> str:
        """What the operator wrote, for the audit event."""
        return self.note


class TimedRequest(ActionRequest, frozen=True, kw_only=True):
    """An action with a reason, and for how long, such as `2h`; without that, until it is ended."""

    why: Annotated[str, Meta(max_length=500)] = msgspec.field(default="", name="reason")
    span: Annotated[str, Meta(max_length=64)] = ""

    @property
    def remark(self) -> str:
        return self.note or self.why


class TaskIds(ActionRequest, frozen=True, kw_only=True):
    """Tasks, by id."""

    ids: Ids


class RetryTasks(TaskIds, frozen=True, kw_only=True):
    """Dead letters, by id. `from_start` discards the results of completed steps."""

    from_start: bool = False


class RetryEdited(ActionRequest, frozen=True, kw_only=True):
    """A dead letter and its new arguments. `[redacted]` stands for the stored value."""

    id: Id
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    from_start: bool = False


class BulkDead(ActionRequest, frozen=True, kw_only=True):
    """All dead letters that match: of a group, a function, a reason, or with a text in the error."""

    group: Text | None = None
    function: Text | None = None
    type: Text | None = None
    reason: Text | None = None
    error: str = ""


class BulkTasks(ActionRequest, frozen=True, kw_only=True):
    """All tasks that match a search, optionally of one status."""

    q: str = ""
    status: TaskStatus | None = None


class JobId(ActionRequest, frozen=True, kw_only=True):
    """A bulk change, which runs in the background."""

    id: Id


class ChangeTask(ActionRequest, frozen=True, kw_only=True):
    """A waiting task, and its new priority, queue or eta."""

    id: Id
    priority: int | None = None
    new_queue: Id | None = None
    eta: Zoned | None = None


class EnqueueTask(ActionRequest, frozen=True, kw_only=True):
    """A call to enqueue: the function by path or name, its arguments, and where and when it runs."""

    function: Text
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: Id | None = None
    priority: int | None = None
    eta: Zoned | None = None


class PutSchedule(ActionRequest, frozen=True, kw_only=True):
    """A schedule to add or replace: a cron expression, or an interval in seconds or as `5m`.

    `[redacted]` stands for the stored value.
    """

    id: Id
    function: Text
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    cron: Text | None = None
    tz: Text | None = None
    interval: Text | None = None
    queue: Id | None = None
    missed: Literal["skip", "once", "all"] = "once"
    overlap: Literal["allow", "skip", "queue", "cancel_old"] = "allow"


class BreakerName(ActionRequest, frozen=True, kw_only=True):
    """A circuit breaker."""

    name: Text


class QueueName(ActionRequest, frozen=True, kw_only=True):
    """A queue."""

    queue: Id


class PauseQueue(TimedRequest, frozen=True, kw_only=True):
    """A queue to pause, why, and for how long, such as `2h`; without that, until it is resumed."""

    queue: Id


class FunctionName(ActionRequest, frozen=True, kw_only=True):
    """A function, by path or name."""

    function: Text


class PauseFunction(TimedRequest, frozen=True, kw_only=True):
    """A function to pause, why, and for how long, such as `2h`; without that, until it is resumed."""

    function: Text


class PurgeQueue(QueueName, frozen=True, kw_only=True):
    """A queue, and its name a second time to prevent a purge by mistake."""

    confirm: str


class WorkerId(ActionRequest, frozen=True, kw_only=True):
    """A worker."""

    id: Id


class SetSlots(WorkerId, frozen=True, kw_only=True):
    """A worker, and how many tasks it is to run at a time."""

    slots: Annotated[int, Meta(ge=1)]


class LimitKey(ActionRequest, frozen=True, kw_only=True):
    """A limit."""

    key: Text


class SetLimit(LimitKey, frozen=True, kw_only=True):
    """A limit and its new numbers. `rate` is text such as 100/5m."""

    max_running: Annotated[int, Meta(ge=1)] | None = None
    rate: Text | None = None


class HoldLimit(TimedRequest, frozen=True, kw_only=True):
    """A limit that is to admit nothing, why, and for how long; without that, until it is released."""

    key: Text


class ScheduleId(ActionRequest, frozen=True, kw_only=True):
    """A schedule."""

    id: Id


class BackfillSchedule(ScheduleId, frozen=True, kw_only=True):
    """A schedule and the time range whose missed times to run."""

    start: Zoned
    end: Zoned


class FlowId(ActionRequest, frozen=True, kw_only=True):
    """A flow."""

    id: Id


class RetryFlow(FlowId, frozen=True, kw_only=True):
    """A flow that did not succeed, and the node to run again, with all that come after it."""

    node: Text | None = None


class SendEvent(ActionRequest, frozen=True, kw_only=True):
    """An event, its value, and the task or flow that waits for it; without `id`, all that wait for its name.

    `text` is a value that is a text, without quotes.
    """

    id: Id | None = None
    name: Id
    value: Any = None
    text: str | None = None


class MuteGroup(ActionRequest, frozen=True, kw_only=True):
    """A group of dead letters with one error, and for how many days it is muted."""

    group: Id
    days: Annotated[int, Meta(ge=1, le=MAX_MUTED_DAYS)] = 7

    @property
    def subject(self) -> str:
        return muted_subject(self.group, self.days)


class GroupId(ActionRequest, frozen=True, kw_only=True):
    """A group of dead letters with one error."""

    group: Id


class AddNote(ActionRequest, frozen=True, kw_only=True):
    """A note, and what it is about: the path of a page, such as `/queues/mail`."""

    about: Annotated[str, Meta(min_length=2, max_length=300, pattern="^/")]
    note: Annotated[str, Meta(min_length=1, max_length=500)]

    @property
    def subject(self) -> str:
        return self.about


def _shortened(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value[:5]) + (f" and {len(value) - 5} more" if len(value) > 5 else "")
    return str(value)


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A message for people, the number of changes, and why others were refused (id to reason)."""

    message: str
    done: int = 1
    refused: dict[str, str] = {}
    path: str = ""
    """The page that shows the result, if it is not the page of the action."""
