"""The events of a run, one line for each, recorded outside the store under test."""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, omit_defaults=True):
    """One event, `at` seconds on a clock that all processes of a run share.

    | what | by | fields |
    |---|---|---|
    | `enqueue.try`, `.ok`, `.refused` | producer | `id`; with `try`, `value` is the plan of the task |
    | `enqueue.replaced` | producer | `id`, `value`: the task that has the arguments of this call |
    | `limit.try`, `.ok` | operator | `id`: the limit, `value`: what it allows from then on |
    | `cancel.try`, `.ok` | operator | `id`; with `ok`, `value`: whether the task had not ended |
    | `retry_dead.try` | operator | `id` |
    | `store.claim` | store | `id`, `token`, `owner`; only where the store can be observed |
    | `claim` | worker | `id`, `token`, `owner` |
    | `lease` | worker | `owner`, `until`: the lease cannot expire before that |
    | `start` | task | `id`, `token`, `value`: the argument if it may be replaced; of an item, its call |
    | `end` | task | `id`, `token`, `value`: returned, raised or stopped |
    | `step` | task | `id`, `token`, `value`: the number of the finished step |
    | `done`, `retried`, `dead`, `cancelled`, `released`, `snoozed` | worker | `id`, `token`: recorded |
    | `stale` | worker | `id`, `token`: refused |
    | `placed` | planner | `id`: the schedule, `until`: the wall-clock time |
    | `schedule` | reader | `id`, `value`: all its nominal times with the ids of their tasks |
    | `fired` | worker | `id`, `value`: the schedule, `until`: the nominal time |
    | `kill`, `stop`, `cont`, `term`, `restart`, `cut`, `calm` | nemesis | `value`: the process, `until`: how long |
    | `stall` | stall_detector | `until`: how long the machine did not run it, until now |
    | `final` | reader | `id`, `token`, `value`: the stored record after the run |
    | `final` | auditor | the same of a task that has ended, before its record is purged |
    | `rows` | auditor | `value`: how many records there are |
    | `sample` | nemesis | `value`: memory, open files and threads, by process |
    | `written` | reader | `id`, `value`: how many rows the task has written |
    | `counted` | reader | `value`: how many tasks the store counts, by status |
    | `passed` | process | `value`: how often each failpoint was passed |
    | `resources` | process | `value`: open files, threads, memory |
    """

    at: float
    by: str
    what: str
    id: str = ""
    token: int = 0
    owner: str = ""
    until: float = 0.0
    value: Any = None


Sink = Callable[[Event], None]


class Journal:
    """The events that one process records."""

    def __init__(self, by: str, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self.by = by
        self._sink = sink
        self.now = clock

    def note(
        self,
        what: str,
        task_id: str = "",
        token: int = 0,
        *,
        owner: str = "",
        until: float = 0.0,
        value: Any = None,
    ) -> None:
        """Record an event that happens now."""
        self._sink(Event(self.now(), self.by, what, task_id, token, owner, until, value))


def journal_file(by: str, path: Path) -> Journal:
    """Return a journal that survives the death of its process: each line is one append."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    encode = msgspec.json.Encoder().encode
    return Journal(by, lambda event: (os.write(file, encode(event) + b"\n"), None)[1])


def read_history(paths: Iterable[Path]) -> list[Event]:
    """Return all events of these files by time. Incomplete last lines are ignored."""
    decode = msgspec.json.Decoder(Event).decode
    events = [
        decode(line) for path in paths for line in path.read_bytes().split(b"\n")[:-1] if line
    ]
    return sorted(events, key=lambda event: event.at)


current: contextvars.ContextVar[Journal] = contextvars.ContextVar("chaos_journal")
"""The journal of the process that this code runs in."""
