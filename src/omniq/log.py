"""Writes the lifecycle events as log lines, through loguru.

omniq logs nothing until `enable()` is called, and then writes to the sinks of the application: it
never adds, removes or changes one. The event's name is the message, its fields are log fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from loguru import logger

from omniq.errors import SettingsError
from omniq.escaping import visible
from omniq.events import (
    BreakerOpened,
    ChoreFailed,
    ClockDiffers,
    Dispatcher,
    Event,
    FunctionMissing,
    HookFailed,
    LeaseLoss,
    LeaseRenewed,
    LoopBlocked,
    PollEmpty,
    ProcessEnded,
    RecordQuarantined,
    ScheduleFired,
    ScheduleMissed,
    StaleRefused,
    StepSkipped,
    StoreRestored,
    TaskClaimed,
    TaskDead,
    TaskEnqueued,
    TaskRetried,
    TasksGivenBack,
    TasksLeft,
    TaskStuck,
    WorkerRecycling,
    WorkerStalled,
    WorkerStuck,
    facts,
)

if TYPE_CHECKING:
    from loguru import Level

_LEVELS: dict[type[Event], str] = {
    TaskEnqueued: "DEBUG",
    TaskClaimed: "DEBUG",
    TaskRetried: "DEBUG",
    LeaseRenewed: "DEBUG",
    PollEmpty: "DEBUG",
    ScheduleFired: "DEBUG",
    ScheduleMissed: "WARNING",
    StaleRefused: "WARNING",
    StepSkipped: "WARNING",
    TasksGivenBack: "WARNING",
    TasksLeft: "WARNING",
    FunctionMissing: "WARNING",
    LeaseLoss: "WARNING",
    LoopBlocked: "WARNING",
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
    ChoreFailed: "ERROR",
}
"""Events that are not INFO: DEBUG is routine, WARNING was repaired, ERROR needs a person."""

_enabled = False
_level = "INFO"
_threshold = logger.level(_level).no
_attached: WeakKeyDictionary[Dispatcher, Callable[[], None]] = WeakKeyDictionary()


def enable(level: str = "INFO") -> None:
    """Write omniq's log lines of `level` and above to the application's sinks."""
    global _enabled, _level, _threshold
    try:
        _threshold = logger.level(level.upper()).no
    except ValueError:
        raise SettingsError(
            f"log level {level!r}: expected TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL"
        ) from None
    _level, _enabled = level.upper(), True
    logger.enable("omniq")
    for dispatcher in list(_attached):
        _unsubscribe(dispatcher)
        _subscribe(dispatcher)


def disable() -> None:
    """Stop writing log lines."""
    global _enabled
    _enabled = False
    logger.disable("omniq")
    for dispatcher in list(_attached):
        _unsubscribe(dispatcher)


def is_enabled() -> bool:
    """Whether logging is enabled. Check it before subscribing `write`, which costs time per event."""
    return _enabled


def enabled_level() -> str | None:
    """The enabled level, None when logging is disabled. Child processes are started with it."""
    return _level if _enabled else None


def attach(dispatcher: Dispatcher) -> Callable[[], None]:
    """Log the dispatcher's events while logging is enabled, now or later; return the detacher.

    While logging is disabled nothing is subscribed, so that events cost nothing.
    """
    _attached.setdefault(dispatcher, _nothing)
    if _enabled:
        _subscribe(dispatcher)
    return lambda: _attached.pop(dispatcher, _nothing)()


def _subscribe(dispatcher: Dispatcher) -> None:
    if not dispatcher.has(write):
        _attached[dispatcher] = dispatcher.subscribe(write, kinds=_wanted())


def _unsubscribe(dispatcher: Dispatcher) -> None:
    _attached[dispatcher]()
    _attached[dispatcher] = _nothing


def _wanted() -> list[type[Event]]:
    """The event classes of the enabled level and above."""
    return [kind for kind in _kinds(Event) if _level_of(kind).no >= _threshold]


def _kinds(kind: type[Event]) -> Iterator[type[Event]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)


def _level_of(kind: type[Event]) -> Level:
    return logger.level(_LEVELS.get(kind, "INFO"))


def _nothing() -> None:
    """The unsubscriber of a dispatcher that is not subscribed."""


def write(event: Event) -> None:
    """Log one event. Subscribe it to a `Dispatcher`."""
    level = _level_of(type(event))
    if _enabled and level.no >= _threshold:
        # Escaped for every sink: callers that enqueue a task choose its function, queue and error.
        fields = {
            key: visible(value) if isinstance(value, str) else value
            for key, value in facts(event).items()
        }
        line = event.name + "".join(f" {key}={value}" for key, value in fields.items())
        # As an argument and not as the template: a field may contain braces.
        logger.bind(event=event.name, **fields).log(level.name, "{}", line)
