"""What a pool does about tasks whose function it cannot run: it leaves them to other workers.

Its claims name what it can run, so that it does not even see the others. A function that turns out to
be missing is excluded by name. Nothing of this uses an attempt, and nothing becomes a dead letter,
unless the setting `unknown_function_timeout` says after how long. What a pool without named modules
leaves, because it is not marked, is reported with what to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from omniq import events
from omniq.errors import FunctionNotFound
from omniq.events import Dispatcher
from omniq.models import Runnable, Task, TaskError, WorkerInfo
from omniq.operations.health import due_time, unrunnable_tasks
from omniq.outcomes import Failed, Outcome, Released
from omniq.storage.base import BaseStorage
from omniq.tasks.functions import FunctionCache

_DELAY = timedelta(seconds=5)
"""The pause of a task that would be claimed again and again otherwise."""

_MAX_ENDED = 100
"""How many tasks one round ends as dead letters."""

_MAX_REPORTED = 100
"""How many functions a pool reports that it leaves."""

_SHORTEST_ROUND, _LONGEST_ROUND, _ROUNDS = 0.5, 60.0, 4
"""Seconds between two rounds: the timeout divided by `_ROUNDS`, within these bounds."""


def newer_version(task: Task, version: int) -> FunctionNotFound:
    """Why a worker whose code has that version leaves a task whose arguments are of a newer one."""
    why = f"a task has version {task.version} of its arguments, and the code of this worker has version {version}"
    return FunctionNotFound(task.func_path, why, elsewhere=True)


class UnknownFunctions:
    """Decides about the tasks that one pool cannot run."""

    def __init__(
        self, storage: BaseStorage, functions: FunctionCache, dispatcher: Dispatcher
    ) -> None:
        self._storage = storage
        self._clock = storage.clock
        self._functions = functions
        self._events = dispatcher
        self._timeout = storage.settings.unknown_function_timeout
        self._reported: set[str] = set()

    @property
    def runnable(self) -> Runnable:
        """The functions to claim. From any thread."""
        return self._functions.runnable

    def reported_runnable(self) -> Runnable:
        """The same for the list of workers, searched anew every ten seconds. From any thread."""
        self._functions.refresh_sometimes()
        return self._functions.runnable

    @property
    def pause(self) -> float | None:
        """Seconds between two calls of `end_overdue`; None when no task is ever ended by it."""
        if self._timeout is None:
            return None
        return min(max(self._timeout / _ROUNDS, _SHORTEST_ROUND), _LONGEST_ROUND)

    def release(self, task: Task, error: FunctionNotFound) -> Released:
        """Leave a task to others whose function was found missing, and claim no more of that function."""
        is_new = not self._functions.is_excluded(task.func_path)
        if not self._functions.exclude(task.func_path, error.why):
            return self._release_later(task)
        if is_new:
            self._events.emit(events.FunctionMissing(func_path=task.func_path, reason=error.why))
        # It keeps its place: a worker that has the function may claim it immediately.
        return Released(task.id, task.token, unknown_function=True)

    def split(
        self, claimed: Sequence[Task], runnable: Runnable
    ) -> tuple[Sequence[Task], list[Released]]:
        """The tasks to run, and the release of those that `runnable`, which the claim named, excludes.

        There are such tasks only in a storage that ignores it. They pause, since the next claim would
        return them again.
        """
        # The claims of a busy worker name few functions: one look at each, not at each task.
        unseen = {task.func_path for task in claimed}.difference(self._functions.found)
        refused = {func_path for func_path in unseen if not runnable.accepts(func_path)}
        if not refused:
            return claimed, []
        others = [task for task in claimed if task.func_path in refused]
        mine = [task for task in claimed if all(task is not other for other in others)]
        return mine, [self._release_later(task) for task in others]

    async def end_overdue(self) -> list[tuple[Task, Outcome]]:
        """Claim tasks that no live worker has been able to run for too long; returns how each ends."""
        if self._timeout is None:
            return []
        storage, latest = self._storage, self._clock.now() - timedelta(seconds=self._timeout)
        waiting = await unrunnable_tasks(storage, await self._workers())
        names = frozenset(task.func_path for task in waiting if due_time(task) <= latest)
        if not names:
            return []
        claimed = await storage.reserve(_MAX_ENDED, runnable=Runnable(names=names))
        return [
            (
                task,
                self._failure(task)
                if task.func_path in names and due_time(task) <= latest
                else Released(task.id, task.token),
            )
            for task in claimed
        ]

    async def report_left(self) -> None:
        """Report, once for each function, what waits and no live worker runs, and why this one does not.

        For a pool without named modules: it does not claim such tasks, and learns of them only here.
        """
        if not self._functions.is_open or not self._events.wants(events.FunctionMissing):
            return
        waiting = await unrunnable_tasks(self._storage, await self._workers())
        for func_path in sorted({task.func_path for task in waiting} - self._reported):
            if len(self._reported) >= _MAX_REPORTED:
                return
            self._reported.add(func_path)
            if self._functions.is_excluded(func_path):
                continue
            try:
                self._functions.resolve(func_path)
            except FunctionNotFound as error:
                self._events.emit(events.FunctionMissing(func_path=func_path, reason=error.why))

    async def _workers(self) -> list[WorkerInfo]:
        return [
            # The last heartbeat may not have reported yet what was found missing since.
            msgspec.structs.replace(worker, runnable=self.runnable)
            if worker.id == self._storage.owner
            else worker
            for worker in await self._storage.workers()
        ]

    def _failure(self, task: Task) -> Failed:
        why = f"no live worker has been able to run it for {self._timeout:g} s"
        error = TaskError.from_exception(
            FunctionNotFound(task.func_path, why), timestamp=self._clock.now()
        )
        return Failed(task.id, task.token, error, "unknown function", hook="")

    def _release_later(self, task: Task) -> Released:
        later = self._clock.now() + _DELAY
        return Released(task.id, task.token, unknown_function=True, eta=later)
