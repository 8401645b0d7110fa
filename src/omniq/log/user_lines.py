"""Lines that the application's code logs: where they go in `omniq worker`, and which task they belong to.

Code may log with loguru or with `logging` of the standard library. In a worker both come out on the
console, unless the application has set up its own: then its handlers and sinks get them as they are,
with the same task id, function and attempt.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from loguru import logger

from omniq.clock import SYSTEM_CLOCK, to_micros
from omniq.concurrency.running_task import running_task
from omniq.log.console import Console, UserLine
from omniq.log.wording import level_named

if TYPE_CHECKING:
    from loguru import Message, Record

_FORMATTER = logging.Formatter()
_OWN = "omniq.log"


class TaskFilter(logging.Filter):
    """Adds `task_id`, `func_path` and `attempt` of the running task to the records of a handler.

    `omniq worker` gives it to the handlers of the root logger. Outside of a task the fields are empty,
    so that one format serves all processes:

        handler.addFilter(omniq.log.TaskFilter())
        handler.setFormatter(logging.Formatter("%(levelname)s %(task_id)s %(message)s"))
    """

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in _fields().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def add_task(record: Record) -> None:
    """Add the same fields to `extra` of a loguru record: `logger.configure(patcher=omniq.log.add_task)`.

    `omniq worker` does this by itself. Outside of a task it adds nothing.
    """
    if running_task() is not None:
        record["extra"] = {**_fields(), **record["extra"]}


def _fields() -> dict[str, Any]:
    task = running_task()
    if task is None:
        return {"task_id": "", "func_path": "", "attempt": ""}
    return {"task_id": task.task_id, "func_path": task.func_path, "attempt": task.attempt}


def take_loguru(console: Console) -> None:
    """Write what code logs with loguru to the console, in place of loguru's own sink on stderr."""

    def write(message: Message) -> None:
        record = message.record
        console.user(
            UserLine(
                to_micros(record["time"]),
                record["level"].name,
                record["name"] or "",
                record["message"],
                # The format below leaves nothing but the traceback.
                str(message).strip("\n"),
                running_task(),
            )
        )

    logger.enable("omniq")
    logger.remove()
    # Not `diagnose`: it prints the values of variables, and a task's arguments are private.
    logger.add(
        write,
        level=console.config.level.upper(),
        format=lambda _: "{exception}",
        filter=lambda record: not _is_event(record),
        backtrace=False,
        diagnose=False,
    )
    logger.configure(patcher=add_task)


def _is_event(record: Record) -> bool:
    # The console has it already, without loguru.
    return record["name"] == _OWN and "event" in record["extra"]


def take_stdlib(console: Console) -> None:
    """Write what code logs with `logging` to the console, if the application has set up nothing.

    Handlers that it has set up get a `TaskFilter`. Call it when the application's modules are imported,
    so that they come first.
    """
    root = logging.getLogger()
    if root.handlers:
        for handler in root.handlers:
            if not any(isinstance(each, TaskFilter) for each in handler.filters):
                handler.addFilter(TaskFilter())
        return
    root.addHandler(ConsoleHandler(console))
    if root.level == logging.WARNING:
        # The default of Python. A worker shows INFO.
        root.setLevel(level_named(console.config.level).no)


class ConsoleHandler(logging.Handler):
    """Writes the records of `logging` to the console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.user(_line_of(record))
        except Exception:
            # Arguments that do not fit the message, for one: `logging` prints where.
            self.handleError(record)


def _line_of(record: logging.LogRecord) -> UserLine:
    exception = ""
    if record.exc_info and record.exc_info[0] is not None:
        exception = _FORMATTER.formatException(record.exc_info)
    if record.stack_info:
        exception = f"{exception}\n{_FORMATTER.formatStack(record.stack_info)}".lstrip("\n")
    return UserLine(
        SYSTEM_CLOCK.micros(),
        record.levelname,
        record.name,
        record.getMessage(),
        exception,
        running_task(),
    )
