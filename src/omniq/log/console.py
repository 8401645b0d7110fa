"""Log lines on stderr, of a process whose application is omniq itself: `omniq worker` and its children.

A worker runs tens of thousands of tasks a second and writes two lines for each, so these lines do not
go through a logging library: they are gathered, and written once for each turn of the event loop. A
line that another thread or the code of a task writes comes after all lines that were gathered before.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from omniq.clock import SYSTEM_CLOCK
from omniq.concurrency.running_task import RunningTask
from omniq.events import Event, WorkerStarted
from omniq.log.config import LogConfig
from omniq.log.stderr import Stderr
from omniq.log.wording import fields_of, indented, is_repeated, level_named, level_of, text_of
from omniq.text.escaping import visible

if TYPE_CHECKING:
    from omniq.models import Task

_MOST_NAMES = 1_000
_PAUSE = 0.1
_IN_BANNER = frozenset({"version", "storage", "queues", "functions", "schedules", "stop"})
_monotonic = SYSTEM_CLOCK.monotonic
_COLOURS = {"TRACE": "36", "DEBUG": "34", "WARNING": "33", "ERROR": "31", "CRITICAL": "41"}


class UserLine(NamedTuple):
    """A line that the application's code has logged."""

    micros: int
    level: str
    logger: str
    message: str
    exception: str
    task: RunningTask | None


class _Format(Protocol):
    def started(self, task: Task) -> str: ...

    def succeeded(self, task: Task, seconds: float) -> str: ...

    def event(self, event: Event) -> str: ...

    def user(self, line: UserLine) -> str: ...


class Console:
    """Writes events and lines of user code to stderr. From any thread.

    What is gathered is written at the next turn of the event loop, before anything that is written from
    elsewhere, and when the process exits; a task that ends the process by `os._exit` after its first
    `await` loses no line.
    """

    def __init__(self, config: LogConfig) -> None:
        self.config = config
        self._lowest = level_named(config.level).no
        self._format: _Format = (
            JsonFormat(config) if config.format == "json" else TextFormat(config)
        )
        self._lock = threading.RLock()
        self._stderr = Stderr(self._left_out)
        self._is_flush_due = False
        # Lines of event loops, which append them without the lock. That is safe: only `write` removes
        # lines, under the lock, and only those that it has seen. The line of a second loop may come
        # before the first line of a turn of the main loop; then the second loop writes both.
        self._gathered: list[str] = []
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forget)

    def started(self, task: Task) -> None:
        """Write that a run starts. On an event loop."""
        gathered = self._gathered
        if not gathered:
            asyncio.get_running_loop().call_soon(self.flush)
        gathered.append(self._format.started(task))

    def succeeded(self, task: Task, seconds: float) -> None:
        """Write that a run has succeeded after that time. On an event loop."""
        gathered = self._gathered
        if not gathered:
            asyncio.get_running_loop().call_soon(self.flush)
        gathered.append(self._format.succeeded(task, seconds))

    def event(self, event: Event) -> None:
        """Write the line of an event, unless it is below the level: of one kind, events differ in it.

        The end of a task that has failed for good is one line.
        """
        if is_repeated(event) or level_named(level_of(event)).no < self._lowest:
            return
        line = self._format.event(event)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.write(line)
        else:
            self._gathered.append(line)
            loop.call_soon(self.flush)

    def user(self, line: UserLine) -> None:
        """Write a line of the application's code."""
        self.write(self._format.user(line))

    def note(self, message: str, level: str) -> None:
        """Write a line of omniq that is not an event."""
        self.write(self._note(message, level))

    def write(self, text: str) -> None:
        """Write the text now, after everything that was gathered."""
        with self._lock:
            gathered = self._gathered[:]
            del self._gathered[: len(gathered)]
            self._stderr.write("".join(gathered) + text)
            if self._stderr.is_behind:
                self._try_again()

    def flush(self) -> None:
        """Write what was gathered."""
        self.write("")

    def finish(self) -> None:
        """Write what was gathered, and wait for a slow reader of stderr."""
        with self._lock:
            self.flush()
            self._stderr.finish()

    def close(self) -> None:
        """Write what was gathered, and nothing more at the exit of the process."""
        self.finish()
        atexit.unregister(self.finish)

    def _try_again(self) -> None:
        """Write what waits for the reader of stderr a little later, also if no line follows."""
        if self._is_flush_due:
            return
        try:
            asyncio.get_running_loop().call_later(_PAUSE, self._flush_again)
        except RuntimeError:
            # Another thread. The loop writes the line that the task of this one ends with.
            return
        self._is_flush_due = True

    def _flush_again(self) -> None:
        self._is_flush_due = False
        self.flush()

    def _left_out(self, count: int) -> str:
        return self._note(f"stderr was not read for a while; {count} lines are left out", "WARNING")

    def _note(self, message: str, level: str) -> str:
        return self._format.user(UserLine(SYSTEM_CLOCK.micros(), level, "omniq", message, "", None))

    def _forget(self) -> None:
        """After a fork: what was gathered is written by the parent, whose thread may hold the lock."""
        self._lock = threading.RLock()
        self._gathered.clear()
        self._stderr.forget()


class TextFormat:
    """Lines for people: time, level, process id, event, fields."""

    def __init__(self, config: LogConfig) -> None:
        self._config = config
        self._pid = os.getpid()
        self._is_colourful = is_colourful()
        self._names: dict[str, str] = {}
        self._started = self._succeeded = ""
        self._next_millisecond = 0.0

    # These two are written for every task, so everything that most lines share is made once: what
    # stands before the id, once for each millisecond.

    def started(self, task: Task) -> str:
        if _monotonic() >= self._next_millisecond:
            self._begin_millisecond()
        return f"{self._started}{self._facts(task)}\n"

    def succeeded(self, task: Task, seconds: float) -> str:
        if _monotonic() >= self._next_millisecond:
            self._begin_millisecond()
        return f"{self._succeeded}{self._facts(task)} seconds={seconds:.6f}\n"

    def _facts(self, task: Task) -> str:
        names, task_id = self._names, task.id
        return (
            f"{task_id if task_id.isprintable() else visible(task_id)} "
            f"func_path={names.get(task.func_path) or self._name(task.func_path)} "
            f"queue={names.get(task.queue) or self._name(task.queue)} "
            f"attempt={task.attempts + task.crashes + 1} token={task.token} owner={task.owner}"
            f"{'' if task.task_type is None else self._type(task.task_type)}"
        )

    def _type(self, task_type: str) -> str:
        return f" task_type={self._names.get(task_type) or self._name(task_type)}"

    def event(self, event: Event) -> str:
        fields, table = fields_of(event, self._config), ""
        # Of several processes, one says all this; it knows how to stop the worker.
        if isinstance(event, WorkerStarted) and event.stop and is_terminal():
            table = banner(fields)
            fields = {name: fields[name] for name in fields if name not in _IN_BANNER}
        head = self._head(SYSTEM_CLOCK.micros(), level_of(event))
        return f"{head}{text_of(event, fields)}\n{table}"

    def user(self, line: UserLine) -> str:
        task = line.task
        ids = ""
        if task is not None:
            ids = f" id={task.task_id} func_path={task.func_path} attempt={task.attempt}"
        message = visible(line.message, keep="\n\t")
        if line.exception:
            message += "\n" + visible(line.exception.rstrip("\n"), keep="\n\t")
        first, *below = message.split("\n", 1)
        text = visible(f"{line.logger}{ids}: ") + first
        # A text of a stranger, logged by the application, must not look like a line of the log.
        text += "".join("\n" + indented(each) for each in below)
        return f"{self._head(line.micros, line.level)}{text}\n"

    def _begin_millisecond(self) -> None:
        micros = SYSTEM_CLOCK.micros()
        head = self._head(micros, "INFO")
        self._started, self._succeeded = f"{head}task.started id=", f"{head}task.succeeded id="
        self._next_millisecond = _monotonic() + (1000 - micros % 1000) / 1e6

    def _head(self, micros: int, level: str) -> str:
        second = datetime.fromtimestamp(micros // 1_000_000, UTC)
        stamp = f"{second:%Y-%m-%d %H:%M:%S}.{micros // 1000 % 1000:03}Z"
        shown = f"{level:<7}"
        if self._is_colourful:
            stamp = f"\x1b[2m{stamp}\x1b[0m"
            if colour := _COLOURS.get(level):
                shown = f"\x1b[1;{colour}m{shown}\x1b[0m"
        return f"{stamp} {shown} {self._pid} "

    def _name(self, name: str) -> str:
        """The escaped name of a function or a queue. A worker meets few of them, again and again."""
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        shown = self._names[name] = visible(name)
        return shown


class JsonFormat:
    """One JSON object for each line."""

    def __init__(self, config: LogConfig) -> None:
        self._config = config
        self._pid = os.getpid()

    def started(self, task: Task) -> str:
        return self._line(SYSTEM_CLOCK.micros(), "INFO", _task_fields("task.started", task))

    def succeeded(self, task: Task, seconds: float) -> str:
        fields = _task_fields("task.succeeded", task)
        fields["seconds"] = round(seconds, 6)
        return self._line(SYSTEM_CLOCK.micros(), "INFO", fields)

    def event(self, event: Event) -> str:
        fields = {name: _rounded(value) for name, value in fields_of(event, self._config).items()}
        if "pid" in fields:
            # `pid` is the process that writes the line, in every line.
            fields["worker_pid"] = fields.pop("pid")
        return self._line(SYSTEM_CLOCK.micros(), level_of(event), {"event": event.name, **fields})

    def user(self, line: UserLine) -> str:
        fields: dict[str, Any] = {"logger": line.logger, "message": line.message}
        if line.task is not None:
            fields["id"] = line.task.task_id
            fields["func_path"] = line.task.func_path
            fields["attempt"] = line.task.attempt
        if line.exception:
            fields["exception"] = line.exception
        return self._line(line.micros, line.level, fields)

    def _line(self, micros: int, level: str, fields: dict[str, Any]) -> str:
        time = datetime.fromtimestamp(micros / 1e6, UTC).isoformat(timespec="milliseconds")
        record = {"time": time, "level": level, "pid": self._pid, **fields}
        try:
            encoded = msgspec.json.encode(record, enc_hook=str).decode()
        except UnicodeEncodeError:
            # Half a surrogate pair, in a text of the application.
            encoded = ""
        if not encoded.isascii() or not encoded.isprintable() or not encoded:
            # Escapes all other characters: some of them would move the cursor of a terminal.
            encoded = json.dumps(msgspec.to_builtins(record, enc_hook=str)).replace(
                "\x7f", "\\u007f"
            )
        return f"{encoded}\n"


def _rounded(value: Any) -> Any:
    """The value; a number of seconds to the microsecond."""
    return round(value, 6) if isinstance(value, float) else value


def _task_fields(event: str, task: Task) -> dict[str, Any]:
    fields = {
        "event": event,
        "id": task.id,
        "func_path": task.func_path,
        "queue": task.queue,
        "attempt": task.attempts + task.crashes + 1,
        "token": task.token,
        "owner": task.owner,
    }
    if task.task_type is not None:
        fields["task_type"] = task.task_type
    return fields


def banner(fields: dict[str, Any]) -> str:
    """What a person at a terminal wants to know when a worker starts."""
    lines = [
        f"omniq {fields['version']} runs tasks of {fields.get('storage', 'its storage')}",
        f"  queues     {fields.get('queues', 'all')}",
        f"  functions  {fields.get('functions', 'none')}",
        f"  schedules  {fields.get('schedules', 'none')}",
    ]
    if "stop" in fields:
        lines.append(f"  to stop    {fields['stop']}")
    return "".join(f"{line}\n" for line in lines)


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def is_colourful() -> bool:
    """Whether stderr is a terminal and NO_COLOR is not set."""
    return not os.environ.get("NO_COLOR") and is_terminal()
