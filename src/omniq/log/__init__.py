"""Writes the lifecycle events as log lines: to loguru, to `logging`, or to the console of a worker.

omniq logs nothing until `enable()` or `to_stdlib()` is called, and then writes to the sinks or
handlers of the application: it never adds, removes or changes one. The event's name is the message,
its fields are log fields. `omniq worker` writes to its console, without either library.

- `config`: what a log shows.
- `wording`: the level, the fields and the line of an event.
- `user_frames`: the traceback of a failed run, without the frames of omniq.
- `console`: lines on stderr, gathered for each turn of the event loop.
- `stderr`: writes them, without waiting for a reader that has stopped.
- `user_lines`: what the application's code logs, with the task it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from loguru import logger

from omniq.events import Dispatcher, Event, TaskDead, TaskLines, TaskStarted, TaskSucceeded
from omniq.log import user_lines
from omniq.log.config import LogConfig
from omniq.log.console import Console
from omniq.log.user_lines import TaskFilter, add_task
from omniq.log.wording import fields_of, kinds_from, level_named, level_of, text_of
from omniq.settings import Settings

__all__ = [
    "LogConfig",
    "TaskFilter",
    "add_task",
    "attach",
    "child_config",
    "current_console",
    "disable",
    "enable",
    "enabled_level",
    "is_enabled",
    "open_console",
    "take_stdlib",
    "to_stdlib",
    "write",
]

_LOGURU, _STDLIB, _CONSOLE = "loguru", "stdlib", "console"
_HAVE_LINES = frozenset({TaskStarted, TaskSucceeded})


class _Output(NamedTuple):
    """Where events of some kinds are written. `lines` writes two of them without an event."""

    config: LogConfig
    kinds: frozenset[type[Event]]
    write: Callable[[Event], None]
    lines: TaskLines | None = None


_outputs: dict[str, _Output] = {}
_console: Console | None = None
_attached: WeakKeyDictionary[Dispatcher, Callable[[], None]] = WeakKeyDictionary()


def enable(
    level: str | None = None,
    *,
    tracebacks: bool | None = None,
    error_messages: bool | None = None,
) -> None:
    """Write omniq's log lines of `level` and above to the application's loguru sinks.

    `tracebacks`: with the traceback of each failed run. `error_messages`: with the text of its
    exception. What is not given is read from the settings `log_level`, `log_tracebacks` and
    `log_error_messages`.
    """
    config = _config(level, tracebacks, error_messages)
    kinds = frozenset(kinds_from(config.level))
    logger.enable("omniq")
    _add(_LOGURU, _Output(config, kinds, _write_loguru))


def to_stdlib(
    level: str | None = None,
    *,
    tracebacks: bool | None = None,
    error_messages: bool | None = None,
) -> None:
    """Write the same lines to the logger `omniq` of `logging`, for an application that uses that.

    A record has `event` and the fields of the event as attributes. The parameters are those of `enable`;
    the level of the logger `omniq` applies as well.
    """
    config = _config(level, tracebacks, error_messages)
    _add(_STDLIB, _Output(config, frozenset(kinds_from(config.level)), _write_stdlib))


def open_console(config: LogConfig) -> Console:
    """Write omniq's lines, and those of user code, to stderr: for a process that is omniq's own."""
    global _console
    _console = console = Console(config)
    kinds = frozenset(kinds_from(config.level))
    lines = console if TaskStarted in kinds else None
    _add(_CONSOLE, _Output(config, kinds, console.event, lines))
    user_lines.take_loguru(console)
    return console


def current_console() -> Console | None:
    """The console of this process, if it has one."""
    return _console


def take_stdlib() -> None:
    """Write what user code logs with `logging` to the console, if there is one and nothing is set up."""
    if _console is not None:
        user_lines.take_stdlib(_console)


def disable() -> None:
    """Stop writing log lines."""
    global _console
    logger.disable("omniq")
    if _console is not None:
        _console.close()
        _console = None
    _outputs.clear()
    _attach_all()


def is_enabled() -> bool:
    """Whether logging is enabled. Check it before subscribing `write`, which costs time per event."""
    return bool(_outputs)


def enabled_level() -> str | None:
    """The lowest enabled level, None when logging is disabled."""
    levels = [output.config.level for output in _outputs.values()]
    return min(levels, key=lambda level: level_named(level).no, default=None)


def child_config() -> LogConfig | None:
    """The log of a child process, which has no sink of the application; None without a log."""
    for output in (_outputs.get(_CONSOLE), *_outputs.values()):
        if output is not None:
            return output.config
    return None


def attach(dispatcher: Dispatcher) -> Callable[[], None]:
    """Log the dispatcher's events while logging is enabled, now or later; return the detacher.

    While logging is disabled nothing is subscribed, so that events cost nothing.
    """
    if dispatcher not in _attached:
        _attached[dispatcher] = _nothing
        _subscribe(dispatcher)
    return lambda: _attached.pop(dispatcher, _nothing)()


def write(event: Event) -> None:
    """Log one event. Subscribe it to a `Dispatcher`."""
    for output in list(_outputs.values()):
        if type(event) in output.kinds:
            output.write(event)


def _config(level: str | None, tracebacks: bool | None, error_messages: bool | None) -> LogConfig:
    settings = Settings.load(
        log_level=None if level is None else level_named(level).name,
        log_tracebacks=tracebacks,
        log_error_messages=error_messages,
    )
    return LogConfig.of(settings)


def _add(name: str, output: _Output) -> None:
    _outputs[name] = output
    _attach_all()


def _attach_all() -> None:
    for dispatcher in list(_attached):
        _attached[dispatcher]()
        _attached[dispatcher] = _nothing
        _subscribe(dispatcher)


def _subscribe(dispatcher: Dispatcher) -> None:
    if dispatcher.has(write):
        return
    outputs = list(_outputs.values())
    unsubscribers = [
        dispatcher.subscribe(each.write, each.kinds - _HAVE_LINES if each.lines else each.kinds)
        for each in outputs
    ]
    dispatcher.task_lines = next((each.lines for each in outputs if each.lines), None)

    def unsubscribe() -> None:
        for each in unsubscribers:
            each()
        dispatcher.task_lines = None

    _attached[dispatcher] = unsubscribe


def _nothing() -> None:
    """The unsubscriber of a dispatcher that is not subscribed."""


def _write_loguru(event: Event) -> None:
    config, level = _outputs[_LOGURU].config, level_of(event)
    if level_named(level).no < level_named(config.level).no:
        return
    fields = _fields_of(event, config)
    # As an argument and not as the template: a field may contain braces.
    logger.bind(event=event.name, **fields).log(level, "{}", text_of(event, fields))


def _write_stdlib(event: Event) -> None:
    config, level = _outputs[_STDLIB].config, level_named(level_of(event)).no
    target = logging.getLogger("omniq")
    if level < level_named(config.level).no or not target.isEnabledFor(level):
        return
    fields = _fields_of(event, config)
    target.log(level, "%s", text_of(event, fields), extra={"event": event.name, **fields})


def _fields_of(event: Event, config: LogConfig) -> dict[str, Any]:
    fields = fields_of(event, config)
    if isinstance(event, TaskDead):
        # The line of `AttemptFailed` has it.
        fields.pop("traceback", None)
    return fields
