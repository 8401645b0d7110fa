"""What omniq's processes write to stderr: log lines, and one line for a command that failed.

Only for processes whose application is omniq itself: the command line and its children. A closed
stderr never breaks them.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import NoReturn, TextIO

from omniq import log
from omniq.errors import InvalidValue, OmniqError, ScheduleNotFound, SettingsError, TaskNotFound
from omniq.log import LogConfig
from omniq.log.stderr import write_stderr
from omniq.text.escaping import visible

FAILURE = 1
BAD_USAGE = 2
NOT_FOUND = 3

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_show_warning = warnings.showwarning

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_EXIT_SECONDS = 5.0
"""Seconds the interpreter has to exit; it does not wait longer for threads of the application."""


def start_logging(config: LogConfig) -> None:
    """Write log lines to stderr, of the application and of omniq, and warnings among them."""
    log.open_console(config)
    warnings.showwarning = show_warning


def write(text: str) -> None:
    """Write to stderr, after the log lines before it; does nothing when there is none."""
    console = log.current_console()
    if console is None:
        write_stderr(text)
    else:
        console.write(text)


def note(text: str, level: str = "INFO") -> None:
    """Write a line for people: a line of the log, if there is one."""
    console = log.current_console()
    if console is None:
        write(f"omniq: {visible(text)}\n")
    else:
        console.note(text, level)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning as a line of the log, in the place of `warnings.showwarning`.

    A warning about the settings is written without the place in omniq that gives it.
    """
    if category is UserWarning and filename.startswith(_PACKAGE):
        note(str(message), "WARNING")
    elif file is None and log.current_console() is not None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        note(text.rstrip("\n"), "WARNING")
    else:
        _show_warning(message, category, filename, lineno, file, line)


def report_error(error: OmniqError | str) -> int:
    """Write one line that says what went wrong; returns the exit code for it."""
    write(f"omniq: {visible(' '.join(str(error).split()))}\n")
    if isinstance(error, TaskNotFound | ScheduleNotFound):
        return NOT_FOUND
    return BAD_USAGE if isinstance(error, SettingsError | InvalidValue) else FAILURE


def escape_unencodable_output() -> None:
    """Make stdout escape what its encoding has no character for, instead of failing; also if it is closed."""
    if sys.stdout is None:
        # Closed by the shell (`>&-`): what the command has done must not end as an error.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - kept as stdout
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


def end_by_sigterm() -> None:
    """Exit with 0 at SIGTERM, until the worker has its own handlers: it has not claimed anything yet."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    unblock_signals()


def unblock_signals() -> None:
    """End what `restart_process` began: a signal that arrived since then is handled now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def restart_process() -> NoReturn:
    """Replace this process by a new one with the same command line."""
    flush()
    # The new program has no handlers at first, and would die of a signal. It inherits the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def flush() -> None:
    """Flush the log and both streams. A closed pipe must not become the exit code of a clean stop."""
    if (console := log.current_console()) is not None:
        console.finish()
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
