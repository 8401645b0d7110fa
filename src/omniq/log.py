"""Words the lifecycle events as log lines, through loguru.

omniq is silent until `enable()` is called, and then writes to the sinks the application has: it
never adds, removes or changes one. The event's name is the message, its facts are fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from loguru import logger

from omniq.errors import SettingsError
from omniq.events import (
    BreakerOpened,
    ChoreFailed,
    Dispatcher,
    Event,
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
    LeaseLoss: "WARNING",
    LoopBlocked: "WARNING",
    WorkerRecycling: "WARNING",
    BreakerOpened: "WARNING",
    WorkerStalled: "ERROR",
    WorkerStuck: "ERROR",
    TaskStuck: "ERROR",
    HookFailed: "ERROR",
    ProcessEnded: "WARNING",
    RecordQuarantined: "ERROR",
    TaskDead: "ERROR",
    ChoreFailed: "ERROR",
}
"""Events that are not INFO: DEBUG is routine, WARNING was repaired, ERROR needs somebody."""

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
        _fall_silent(dispatcher)
        _listen(dispatcher)


def disable() -> None:
    """Fall silent again."""
    global _enabled
    _enabled = False
    logger.disable("omniq")
    for dispatcher in list(_attached):
        _fall_silent(dispatcher)


def is_enabled() -> bool:
    """Whether log lines are wanted; ask before subscribing `write`, which costs every event."""
    return _enabled


def enabled_level() -> str | None:
    """The level from which lines are wanted, None when silent. For a child process to do the same."""
    return _level if _enabled else None


def attach(dispatcher: Dispatcher) -> Callable[[], None]:
    """Write its events whenever logging is enabled, now or later; how to end that.

    While logging is off nothing listens, so that events cost nothing.
    """
    _attached.setdefault(dispatcher, _nothing)
    if _enabled:
        _listen(dispatcher)
    return lambda: _attached.pop(dispatcher, _nothing)()


def _listen(dispatcher: Dispatcher) -> None:
    if not dispatcher.has(write):
        _attached[dispatcher] = dispatcher.subscribe(write, kinds=_wanted())


def _fall_silent(dispatcher: Dispatcher) -> None:
    _attached[dispatcher]()
    _attached[dispatcher] = _nothing


def _wanted() -> list[type[Event]]:
    """The events of the level asked for and above."""
    return [kind for kind in _kinds(Event) if _level_of(kind).no >= _threshold]


def _kinds(kind: type[Event]) -> Iterator[type[Event]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)


def _level_of(kind: type[Event]) -> Level:
    return logger.level(_LEVELS.get(kind, "INFO"))


def _nothing() -> None:
    """How to end what has not begun."""


def write(event: Event) -> None:
    """Log one event. Subscribe it to a `Dispatcher`."""
    level = _level_of(type(event))
    if _enabled and level.no >= _threshold:
        fields = facts(event)
        line = event.name + "".join(f" {key}={value}" for key, value in fields.items())
        # As an argument and not as the template: a field may contain braces.
        logger.bind(event=event.name, **fields).log(level.name, "{}", line)
