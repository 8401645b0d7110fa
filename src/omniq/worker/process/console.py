"""What omniq's own processes say on stderr: log lines, and the one line of a command that failed.

Only for processes that omniq itself is the application of: the command line and its children. A
reader that has gone away never breaks them.
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

if TYPE_CHECKING:
    from loguru import Record

FAILURE = 1
BAD_USAGE = 2
NOT_FOUND = 3

_LAST_PATIENCE = 5.0
"""Seconds the interpreter has to end; threads that an application left behind get no longer."""

_FORMAT = (
    "<dim>{time:YYYY-MM-DD HH:mm:ss.SSS}</dim> <level>{level: <7}</level> <dim>{process}</dim> "
    "{extra[shown]}\n{exception}"
)


def start_logging(level: str) -> None:
    """Write log lines of `level` and above to stderr, the application's and omniq's own."""
    log.enable(level)
    logger.remove()
    # Not `diagnose`: it prints the values of variables, and a task's arguments are nobody's business.
    logger.add(
        write,
        level=level.upper(),
        format=_line,
        colorize=is_colourful(),
        backtrace=False,
        diagnose=False,
    )


def _line(record: Record) -> str:
    # What omniq says of a task is one line, whatever is in its error; an application's own
    # messages may have several.
    keep = "" if "event" in record["extra"] else "\n\t"
    record["extra"]["shown"] = visible(record["message"], keep=keep)
    return _FORMAT


def is_colourful() -> bool:
    """Whether stderr is a terminal and nobody has asked for plain text (NO_COLOR)."""
    try:
        return not os.environ.get("NO_COLOR") and sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def write(text: str) -> None:
    """Write to stderr, or not, when there is none or nobody reads it any more."""
    # EPIPE, EIO of a closed terminal, a descriptor that is gone, no stream at all: in each case
    # there is nobody to tell, and the work goes on.
    try:
        sys.stderr.write(str(text))
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def complain(error: OmniqError | str) -> int:
    """Say in one line what went wrong; the exit code for it."""
    write(f"omniq: {visible(' '.join(str(error).split()))}\n")
    if isinstance(error, TaskNotFound | ScheduleNotFound):
        return NOT_FOUND
    return BAD_USAGE if isinstance(error, SettingsError | InvalidValue) else FAILURE


def visible(text: str, *, keep: str = "") -> str:
    """The text with everything written out that a terminal would obey instead of showing it.

    Control characters, escape sequences, characters that turn the direction of writing or that
    have no width: whoever can enqueue a task can choose what is in its error. `keep` lets some
    through, such as line ends.

    >>> visible("\\x1b[2Jall is well\\u202e")
    '\\\\x1b[2Jall is well\\\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )


def tolerate_any_text() -> None:
    """Let stdout write out what its encoding has no character for, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """End a worker's process, whatever its tasks have left behind.

    `at_once`: threads are left that must not go on. Otherwise the interpreter ends as usual, but
    does not wait long for others.
    """
    flush()
    if at_once:
        os._exit(code)
    timer = threading.Timer(_LAST_PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


def start_anew() -> NoReturn:
    """Become a fresh process with the same command line."""
    flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def flush() -> None:
    """Write out what is buffered. A closed pipe must not become the exit code of a clean stop."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _detach(stream)


def _detach(stream: object) -> None:
    """Point the stream at nothing: the interpreter flushes once more when it ends."""
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):
        pass
