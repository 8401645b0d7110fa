"""The words of the log: the level of each event, its fields and its line, safe for every sink."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loguru import logger

from omniq.errors import SettingsError
from omniq.events import (
    AttemptFailed,
    BreakerOpened,
    ClockDiffers,
    Event,
    FunctionMissing,
    HookFailed,
    LeaseLoss,
    LeaseRenewed,
    LoopBlocked,
    PollEmpty,
    ProcessEnded,
    QueueHighWater,
    RecordQuarantined,
    ScheduleFired,
    ScheduleMissed,
    StaleRefused,
    StepSkipped,
    StorageBack,
    StorageFailing,
    StoreRestored,
    TaskCancellation,
    TaskClaimed,
    TaskDead,
    TaskEnqueued,
    TaskFailure,
    TaskRetried,
    TasksGivenBack,
    TasksLeft,
    TaskSnoozed,
    TaskStuck,
    WorkerAdvice,
    WorkerForced,
    WorkerProblem,
    WorkerRecycling,
    WorkerStalled,
    WorkerStopped,
    WorkerStuck,
    facts,
)
from omniq.log.config import LogConfig
from omniq.log.user_frames import user_frames, where
from omniq.text.escaping import visible
from omniq.text.masking import mask_text

if TYPE_CHECKING:
    from loguru import Level

MAX_MESSAGE = 500
"""How many characters of an exception's text a line has."""

LEVELS: dict[type[Event], str] = {
    TaskEnqueued: "DEBUG",
    TaskClaimed: "DEBUG",
    TaskRetried: "DEBUG",
    LeaseRenewed: "DEBUG",
    PollEmpty: "DEBUG",
    QueueHighWater: "DEBUG",
    ScheduleFired: "DEBUG",
    ScheduleMissed: "WARNING",
    AttemptFailed: "WARNING",
    StaleRefused: "WARNING",
    StepSkipped: "WARNING",
    TasksGivenBack: "WARNING",
    TasksLeft: "WARNING",
    FunctionMissing: "WARNING",
    LeaseLoss: "WARNING",
    LoopBlocked: "WARNING",
    WorkerAdvice: "WARNING",
    WorkerForced: "WARNING",
    WorkerRecycling: "WARNING",
    BreakerOpened: "WARNING",
    ClockDiffers: "ERROR",
    WorkerStalled: "ERROR",
    WorkerStuck: "ERROR",
    TaskStuck: "ERROR",
    HookFailed: "ERROR",
    ProcessEnded: "WARNING",
    RecordQuarantined: "ERROR",
    StoreRestored: "ERROR",
    TaskDead: "ERROR",
    StorageFailing: "ERROR",
    StorageBack: "WARNING",
    WorkerProblem: "ERROR",
}
"""Events that are not INFO: DEBUG is routine, WARNING was repaired, ERROR needs a person."""

_USERS_TEXTS: dict[type[Event], str] = {
    TaskCancellation: "reason",
    TaskSnoozed: "reason",
    TaskFailure: "error_message",
    AttemptFailed: "error_message",
    TaskDead: "error_message",
    HookFailed: "error_message",
}
"""Fields with the text of an exception of the user's code. It may contain anything."""


def level_of(event: Event) -> str:
    """The level of the event's line."""
    if type(event) is WorkerStopped and event.timed_out:
        return "WARNING"
    if type(event) is WorkerProblem and event.during_outage:
        # The line of the outage says it once.
        return "DEBUG"
    return LEVELS.get(type(event), "INFO")


def level_named(name: str) -> Level:
    """The level of that name. Raises `SettingsError`."""
    try:
        return logger.level(name.upper())
    except ValueError:
        raise SettingsError(
            f"log level {name!r}: expected TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL"
        ) from None


def kinds_from(level: str) -> set[type[Event]]:
    """The event classes that have lines of that level or above."""
    threshold = level_named(level).no
    return {kind for kind in _kinds(Event) if level_named(_highest(kind)).no >= threshold}


def _highest(kind: type[Event]) -> str:
    """The level that an event of the class may have; `level_of` has the exception."""
    return "WARNING" if kind is WorkerStopped else LEVELS.get(kind, "INFO")


def _kinds(kind: type[Event]) -> Iterator[type[Event]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)


def is_repeated(event: Event) -> bool:
    """Whether another line of the same failure says all of this one: that of `TaskDead` or `AttemptFailed`.

    Applications choose what they write by the names of events, and receive all of them.
    """
    if isinstance(event, AttemptFailed):
        return event.retry_in is None and bool(event.reason)
    return isinstance(event, TaskFailure)


def fields_of(event: Event, config: LogConfig) -> dict[str, Any]:
    """The fields of the event's line, escaped for every sink.

    Callers that enqueue a task choose its function, its queue and its errors. A traceback has several
    lines, each of them escaped.
    """
    fields = facts(event)
    key = _USERS_TEXTS.get(type(event))
    if key in fields:
        if config.error_messages:
            fields[key] = shown_message(fields[key])
        else:
            del fields[key]
    if isinstance(event, WorkerProblem):
        # The line's level shows it.
        del fields["during_outage"]
    traceback = fields.pop("traceback", "")
    stack = fields.pop("stack", "")
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = visible(value)
    if traceback:
        place = where(traceback, first_only=not config.error_messages)
        if place:
            fields["where"] = visible(place)
        if config.tracebacks:
            shown = shown_message if config.error_messages else None
            lines = user_frames(traceback, shown)
            fields["traceback"] = "\n".join(map(visible, lines))
    if stack:
        fields["where"] = visible(where(stack))
        if config.tracebacks:
            fields["stack"] = "\n".join(map(visible, user_frames(stack, shown_message)))
    return fields


def text_of(event: Event, fields: dict[str, Any]) -> str:
    """The line of the event, and below it the traceback if it has one."""
    if isinstance(event, AttemptFailed | HookFailed | TaskDead) and "error" in fields:
        return _failure(event, fields)
    if isinstance(event, WorkerAdvice):
        return f"{event.name}: {fields['advice']}"
    if isinstance(event, StorageFailing):
        since = f"no answer since {event.since:%Y-%m-%d %H:%M:%SZ}; " if event.since else ""
        return (
            f"{event.name}: {fields['error']}; {since}trying again until it answers; "
            "to find the reason, run omniq doctor"
        )
    if isinstance(event, StorageBack):
        return f"{event.name}: the storage is back after {_short(event.seconds)} s"
    if isinstance(event, FunctionMissing):
        head = event.name + _pairs({"func_path": fields["func_path"]})
        return f"{head}: {fields['reason']}; its tasks wait for a worker that has it"
    if isinstance(event, WorkerForced):
        return _forced(event, fields)
    if isinstance(event, LoopBlocked):
        return _block(event, fields)
    return event.name + _pairs(fields)


def _failure(event: AttemptFailed | HookFailed | TaskDead, fields: dict[str, Any]) -> str:
    said = ("error", "error_message", "where", "traceback", "retry_in", "reason")
    head = event.name + _pairs({key: fields[key] for key in fields if key not in said})
    text = f"{head}: {fields['error']}"
    if "error_message" in fields:
        text += f": {fields['error_message']}"
    if "where" in fields:
        text += f" ({fields['where']})"
    if "retry_in" not in fields:
        text += f", failed for good ({fields['reason']})" if "reason" in fields else ""
    elif "reason" in fields:
        text += f", failed ({fields['reason']}), its next time is in {_short(fields['retry_in'])} s"
    else:
        text += f", again in {_short(fields['retry_in'])} s"
    if "traceback" in fields:
        text += "\n" + indented(fields["traceback"])
    return text


def _block(event: LoopBlocked, fields: dict[str, Any]) -> str:
    head = event.name + _pairs(
        {key: fields[key] for key in fields if key not in ("where", "stack")}
    )
    place = f" ({fields['where']})" if "where" in fields else ""
    text = (
        f"{head}: this code blocks the event loop, so no other task on it continues{place}; call it with "
        "asyncio.to_thread, or write the task with def instead of async def"
    )
    return text + "\n" + indented(fields["stack"]) if "stack" in fields else text


def _forced(event: WorkerForced, fields: dict[str, Any]) -> str:
    count, again = event.unfinished, event.unfinished - event.dead
    has = "task has" if count == 1 else "tasks have"
    text = f"{event.name} owner={fields['owner']}: {count} {has} not finished"
    if again:
        text += f" and {'' if again == count else f'{again} of them '}will run again"
        text += "" if event.released else ", when the lease of this worker has expired"
    if event.dead:
        text += f"; {event.dead} may run only once and will be dead letters"
    return f"{text}: {fields['tasks']}"


def _short(seconds: float) -> str:
    """
    >>> _short(2.0), _short(0.126), _short(86400)
    ('2', '0.13', '86400')
    """
    return f"{seconds:.2f}".rstrip("0").rstrip(".")


def _pairs(fields: dict[str, Any]) -> str:
    return "".join(
        f" {key}={value:.6f}" if key == "seconds" else f" {key}={_plain(value)}"
        for key, value in fields.items()
    )


def _plain(value: object) -> object:
    """
    >>> _plain(30.0), _plain(0.0106426030000648), _plain("text")
    ('30', '0.011', 'text')
    """
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def shown_message(text: str) -> str:
    """The text of an exception as one line: without passwords, escaped, and not too long.

    >>> shown_message("GET https://me:secret@host/\\nforged line")
    'GET https://me:***@host/\\\\nforged line'
    """
    shown = visible(mask_text(text))
    return shown if len(shown) <= MAX_MESSAGE else shown[: MAX_MESSAGE - 1] + "…"


def indented(text: str) -> str:
    """The text as lines that cannot be mistaken for lines of the log."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
