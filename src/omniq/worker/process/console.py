"""What omniq's processes write to stderr: log lines, and one line for a command that failed.

Only for processes whose application is omniq itself: the command line and its children. A closed
stderr never breaks them.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from loguru import logger

from omniq import log
from omniq.errors import InvalidValue, OmniqError, ScheduleNotFound, SettingsError, TaskNotFound
from omniq.escaping import visible

if TYPE_CHECKING:
    from loguru import Record

FAILURE = 1
BAD_USAGE = 2
NOT_FOUND = 3

_EXIT_SECONDS = 5.0
"""Seconds the interpreter has to exit; it does not wait longer for threads of the application."""

_FORMAT = (
    "<dim>{time:YYYY-MM-DD HH:mm:ss.SSS}</dim> <level>{level: <7}</level> <dim>{process}</dim> "
    "{extra[shown]}\n{exception}"
)


def start_logging(level: str) -> None:
    """Write log lines of `level` and above to stderr, of the application and of omniq."""
    log.enable(level)
    logger.remove()
    # Not `diagnose`: it prints the values of variables, and a task's arguments are private.
    logger.add(
        write,
        level=level.upper(),
        format=_line,
        colorize=is_colourful(),
        backtrace=False,
        diagnose=False,
    )


def _line(record: Record) -> str:
    # An event of omniq is one line, whatever is in the error of its task; messages of the
    # application may have several.
    keep = "" if "event" in record["extra"] else "\n\t"
    record["extra"]["shown"] = visible(record["message"], keep=keep)
    return _FORMAT


def is_colourful() -> bool:
    """Whether stderr is a terminal and NO_COLOR is not set."""
    try:
        return not os.environ.get("NO_COLOR") and sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def write(text: str) -> None:
    """Write to stderr; does nothing when there is none or when it is closed."""
    # EPIPE, EIO of a closed terminal, a closed descriptor, no stream at all: in each case the line
    # cannot be read, and the work continues.
    try:
        sys.stderr.write(str(text))
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def report_error(error: OmniqError | str) -> int:
    """Write one line that says what went wrong; returns the exit code for it."""
    write(f"omniq: {visible(' '.join(str(error).split()))}\n")
    if isinstance(error, TaskNotFound | ScheduleNotFound):
        return NOT_FOUND
    return BAD_USAGE if isinstance(error, SettingsError | InvalidValue) else FAILURE


def escape_unencodable_output() -> None:
    """Make stdout escape what its encoding has no character for, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def exit_process(code: int, *, at_once: bool = False) -> NoReturn:
    """End a worker's process, whatever its tasks have left running.

    `at_once`: threads still run that must not continue. Otherwise the interpreter exits as usual,
    but does not wait long for other threads.
    """
    flush()
    if at_once:
        os._exit(code)
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


def restart_process() -> NoReturn:
    """Replace this process by a new one with the same command line."""
    flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def flush() -> None:
    """Flush both streams. A closed pipe must not become the exit code of a clean stop."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _detach(stream)


def _detach(stream: object) -> None:
    """Redirect the stream to /dev/null: the interpreter flushes once more when it exits."""
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
    except (OSError, ValueError, AttributeError):
        pass
