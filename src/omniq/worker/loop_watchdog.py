"""Detects, from another thread, that an event loop is blocked, by which task, and for how long."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import Any

from omniq.events import Dispatcher, LoopBlocked, WorkerStuck
from omniq.storage.base import BaseStorage
from omniq.worker.executors.execution import Run
from omniq.worker.running_tasks import RunningTasks

PATIENCE = 1.0
"""Seconds a loop may be blocked before that is reported, unless the pool is given another value."""

_CHECKS = 4
"""How often the loop is checked within its patience."""

_RUN_ONCE = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]
"""The function of asyncio that polls for events and runs callbacks."""

_MAX_FRAMES = 25
_MAX_STACK = 8_192


class LoopWatchdog:
    """Schedules a callback on the loop it was made on, again and again, from another thread.

    It reports each block that is longer than `patience` seconds once.
    """

    def __init__(
        self,
        storage: BaseStorage,
        events: Dispatcher,
        running: RunningTasks,
        *,
        patience: float,
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._events = events
        self._running = running
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pinged_at = 0.0
        self._is_waiting = False
        self._is_reported = False
        self._is_stuck = False

    async def watch(self) -> None:
        """Check the loop until cancelled. Runs in the thread that watches it."""
        pause = self._patience / _CHECKS
        while True:
            self._ping()
            began = self._clock.monotonic()
            await self._clock.sleep(pause)
            if self._clock.monotonic() - began - pause > self._patience / 2:
                # This thread was stopped as well, and with it the whole process: not a block.
                self._pinged_at = self._clock.monotonic()
            elif not self._is_reported and self.is_blocked() and not self._is_polling():
                self._is_reported = True
                self._events.emit(LoopBlocked(**self._fields(self._blocker()), stack=self._stack()))

    def may_renew(self) -> bool:
        """Whether the lease should be renewed: not while the loop is blocked past a deadline.

        The limit is `patience` seconds after the deadline of the run that blocks the loop. If the
        blocking code belongs to no run, the last deadline of all runs counts. A run without a
        timeout may block for ever.
        """
        if not self.is_blocked():
            self._is_stuck = False
            return True
        blocker = self._blocker()
        runs = list(self._running.active.values()) if blocker is None else [blocker]
        until = max((run.deadline for run in runs), default=float("inf"))
        if self._clock.monotonic() <= until + self._patience:
            return True
        if not self._is_stuck:
            self._is_stuck = True
            self._events.emit(WorkerStuck(**self._fields(blocker)))
        return False

    def is_blocked(self) -> bool:
        """Whether the loop has not answered for longer than `patience`."""
        return self._is_waiting and self._clock.monotonic() - self._pinged_at > self._patience

    def _ping(self) -> None:
        if self._is_waiting:
            return
        self._is_reported, self._is_waiting = False, True
        self._pinged_at = self._clock.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            # Closed: a loop that has ended does not block.
            self._is_waiting = False

    def _answer(self) -> None:
        self._is_waiting = False

    def _blocker(self) -> Run | None:
        """The run whose code the loop executes now."""
        job = asyncio.current_task(self._loop)
        if job is None:
            return None
        return next((run for run in list(self._running.active.values()) if run.job is job), None)

    def _fields(self, blocker: Run | None) -> dict[str, Any]:
        fields = {"owner": self._storage.owner}
        if blocker is not None:
            fields |= {"id": blocker.task.id, "func_path": blocker.task.func_path}
        return fields

    def _is_polling(self) -> bool:
        """Whether the loop waits for events: then it is late because the machine is busy."""
        frame = sys._current_frames().get(self._thread)
        if frame is None or frame.f_back is None:
            return False
        return frame.f_code.co_name == "select" and frame.f_back.f_code is _RUN_ONCE

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        # Lines of code only: the values of variables are private.
        lines = [] if frame is None else traceback.format_stack(frame, _MAX_FRAMES)
        return "".join(lines)[-_MAX_STACK:]
