"""Sees from another thread that an event loop is blocked, by what, and whether that is hopeless."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from omniq.clock import Clock
from omniq.events import Dispatcher, LoopBlocked, WorkerStuck
from omniq.worker.executors.execution import Run

PATIENCE = 1.0
"""Seconds a loop may be blocked before that is told, unless the pool says otherwise."""

_LOOKS = 4
"""How often the loop is looked at within its patience."""

_MAX_FRAMES = 25
_MAX_STACK = 8_192


class Watchdog:
    """Asks the loop it was made on for a sign of life, again and again, from another thread.

    Each block longer than `patience` seconds is told once. `active` are the runs of the worker,
    `owner` is its id.
    """

    def __init__(
        self,
        clock: Clock,
        events: Dispatcher,
        *,
        patience: float,
        active: Callable[[], Iterable[Run]],
        owner: Callable[[], str],
    ) -> None:
        self._clock = clock
        self._events = events
        self._patience = patience
        self._active = active
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._asked_at = 0.0
        self._is_waiting = False
        self._is_told = False
        self._is_stuck = False

    async def watch(self) -> None:
        """Look at the loop until cancelled. Runs in the thread that is to see it."""
        pause = self._patience / _LOOKS
        while True:
            self._ask()
            began = self._clock.monotonic()
            await self._clock.sleep(pause)
            if self._clock.monotonic() - began - pause > self._patience / 2:
                # This thread was stopped as well, and with it the whole process: not a block.
                self._asked_at = self._clock.monotonic()
            elif not self._is_told and self.is_blocked():
                self._is_told = True
                self._events.emit(LoopBlocked(**self._facts(self._blocker()), stack=self._stack()))

    def may_beat(self) -> bool:
        """Whether the lease should be kept: not once the loop is blocked past all hope.

        That is `patience` after the deadline of the run that blocks it; of all runs, when it is
        none of them itself but something that one has started. A run without a timeout may block
        for ever.
        """
        if not self.is_blocked():
            self._is_stuck = False
            return True
        blocker = self._blocker()
        runs = list(self._active()) if blocker is None else [blocker]
        until = max((run.deadline for run in runs), default=float("inf"))
        if self._clock.monotonic() <= until + self._patience:
            return True
        if not self._is_stuck:
            self._is_stuck = True
            self._events.emit(WorkerStuck(**self._facts(blocker)))
        return False

    def is_blocked(self) -> bool:
        """Whether the loop has not answered for longer than `patience`."""
        return self._is_waiting and self._clock.monotonic() - self._asked_at > self._patience

    def _ask(self) -> None:
        if self._is_waiting:
            return
        self._is_told, self._is_waiting = False, True
        self._asked_at = self._clock.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            # Closed: a loop that has ended does not block.
            self._is_waiting = False

    def _answer(self) -> None:
        self._is_waiting = False

    def _blocker(self) -> Run | None:
        """The run whose own code the loop is in."""
        job = asyncio.current_task(self._loop)
        if job is None:
            return None
        return next((run for run in list(self._active()) if run.job is job), None)

    def _facts(self, blocker: Run | None) -> dict[str, Any]:
        facts = {"owner": self._owner()}
        if blocker is not None:
            facts |= {"id": blocker.task.id, "func_path": blocker.task.func_path}
        return facts

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        # Lines of code only: the values in them are nobody's business.
        lines = [] if frame is None else traceback.format_stack(frame, _MAX_FRAMES)
        return "".join(lines)[-_MAX_STACK:]
