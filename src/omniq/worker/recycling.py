"""When a process that runs tasks is to be replaced by a new one, between two tasks.

A worker whose threads hang in abandoned calls claims nothing until they return. With the settings
`max_tasks_per_child` and `max_memory_per_child`, a process of `omniq worker` is also replaced when it has
run that many tasks, or uses more memory: it claims no more, and its running tasks end as at a stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from omniq.clock import Clock
from omniq.errors import SettingsError
from omniq.events import Dispatcher, WorkerRecycling
from omniq.settings import Settings
from omniq.storage.base import BaseStorage

_LOOK_PAUSE = 1.0
"""Seconds between two looks at the memory of this process."""

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class ProcessLimits:
    """After how many tasks, and above how many bytes of memory, a process is replaced; None: never."""

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError` if the memory of a process cannot be found here."""
        self.tasks, self.memory = settings.max_tasks_per_child, settings.max_memory_per_child
        if self.memory is not None and memory_of(os.getpid()) is None:
            raise SettingsError(
                "max_memory_per_child: this system has no /proc, from which omniq reads the memory of a "
                "process; use max_tasks_per_child"
            )

    def exceeded(self, tasks: int, pid: int) -> str:
        """Which limit a process has reached: "tasks", "memory", or neither."""
        if not tasks:
            # One that needs more memory for its imports alone still runs tasks, one in each process.
            return ""
        if self.tasks is not None and tasks >= self.tasks:
            return "tasks"
        if self.memory is not None and (memory_of(pid) or 0) > self.memory:
            return "memory"
        return ""


def memory_of(pid: int) -> int | None:
    """The resident memory of a process in bytes; None if it cannot be found."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


class Recycling:
    """Decides whether the process of a pool is to be replaced, and reports it once."""

    def __init__(
        self,
        storage: BaseStorage,
        dispatcher: Dispatcher,
        leaked: Callable[[], int],
        max_leaked: int,
    ) -> None:
        """`leaked`: how many threads hang in abandoned calls."""
        self._storage = storage
        self._clock: Clock = storage.clock
        self._events = dispatcher
        self._leaked = leaked
        self._max_leaked = max_leaked
        self._limits: ProcessLimits | None = None
        self._ran: Callable[[], int] = lambda: 0
        self._reached = ""
        self._next_look = 0.0
        self._has_reported = False

    def limit(self, ran: Callable[[], int]) -> None:
        """Watch the limits of the settings too: the process belongs to `omniq worker`. `ran`: how many tasks."""
        limits = ProcessLimits(self._storage.settings)
        if limits.tasks is not None or limits.memory is not None:
            self._limits, self._ran = limits, ran

    @property
    def is_due(self) -> bool:
        """Whether the pool claims nothing, because its process should be replaced. From any thread."""
        return bool(self._reached) or self._leaked() >= self._max_leaked

    def check(self) -> bool:
        """Look at the limits, report that one is reached, and return `is_due`. On the event loop."""
        if self._limits is not None and not self._reached:
            self._look(self._limits)
        is_due = self.is_due
        if is_due and not self._has_reported:
            leaked = self._leaked()
            reason = self._reached or "threads"
            self._events.emit(
                WorkerRecycling(owner=self._storage.owner, leaked_threads=leaked, reason=reason)
            )
        self._has_reported = is_due
        return is_due

    def _look(self, limits: ProcessLimits) -> None:
        now = self._clock.monotonic()
        if limits.tasks is None and now < self._next_look:
            return
        self._next_look = now + _LOOK_PAUSE
        self._reached = limits.exceeded(self._ran(), os.getpid())
