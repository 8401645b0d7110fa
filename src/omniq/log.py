"""Words the lifecycle events as log lines, through loguru.

omniq is silent until `enable()` is called, and then writes to the sinks the application has: it
never adds, removes or changes one. The event's name is the message, its facts are fields.
"""

from __future__ import annotations

from loguru import logger

from omniq.errors import SettingsError
from omniq.events import (
    ChoreFailed,
    Event,
    LeaseLost,
    LeaseRenewed,
    RecordQuarantined,
    StaleRefused,
    TaskClaimed,
    TaskDead,
    TaskEnqueued,
    TaskRetried,
    TasksGivenBack,
    facts,
)

_LEVELS: dict[type[Event], str] = {
    TaskEnqueued: "DEBUG",
    TaskClaimed: "DEBUG",
    TaskRetried: "DEBUG",
    LeaseRenewed: "DEBUG",
    StaleRefused: "WARNING",
    TasksGivenBack: "WARNING",
    LeaseLost: "WARNING",
    RecordQuarantined: "ERROR",
    TaskDead: "ERROR",
    ChoreFailed: "ERROR",
}
"""Events that are not INFO: DEBUG is routine, WARNING was repaired, ERROR needs somebody."""

_enabled = False
_threshold = logger.level("INFO").no


def enable(level: str = "INFO") -> None:
    """Write omniq's log lines of `level` and above to the application's sinks."""
    global _enabled, _threshold
    try:
        _threshold = logger.level(level.upper()).no
    except ValueError:
        raise SettingsError(
            f"log level {level!r}: expected TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL"
        ) from None
    _enabled = True
    logger.enable("omniq")


def disable() -> None:
    """Fall silent again."""
    global _enabled
    _enabled = False
    logger.disable("omniq")


def is_enabled() -> bool:
    """Whether log lines are wanted; ask before subscribing `write`, which costs every event."""
    return _enabled


def write(event: Event) -> None:
    """Log one event. Subscribe it to a `Dispatcher`."""
    level = logger.level(_LEVELS.get(type(event), "INFO"))
    if _enabled and level.no >= _threshold:
        fields = facts(event)
        line = event.name + "".join(f" {key}={value}" for key, value in fields.items())
        # As an argument and not as the template: a field may contain braces.
        logger.bind(event=event.name, **fields).log(level.name, "{}", line)
