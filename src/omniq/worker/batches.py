"""Collects claimed tasks of batched functions, and says when each batch is called.

A batch has one slot of the pool. While it is open, the claim loop claims more tasks of its function and
queue into it. It is called when it is full, when `wait` seconds have passed, or when the pool drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

from omniq.clock import Clock
from omniq.concurrency.futures import finish
from omniq.models import Runnable, Task
from omniq.tasks.signature import Callee
from omniq.worker.demand import Order
from omniq.worker.executors.batch_call import BatchCall, Item
from omniq.worker.executors.execution import Execution, Run, abandon

_LOOKS = 10
"""How often an open batch asks for more tasks while it waits."""

_SHORTEST_LOOK = 0.01

_FALLS_BY = 10
"""Tasks that have failed run in calls of a tenth of the size, and of a tenth of that after another failure."""


class BatchRun(Run):
    """The run of one item. Before its call begins, `context` is None."""

    __slots__ = ("batch", "has_ended")

    def __init__(self, task: Task, started: float, timeout: float | None, batch: OpenBatch) -> None:
        super().__init__(task, started, timeout)
        self.batch = batch
        self.deadline = float("inf")
        self.has_ended = False

    def begin(self, now: float, job: asyncio.Task[None] | None) -> None:
        """Its time counts from the call."""
        self.started, self.job = now, job
        if self.timeout is not None:
            self.deadline = now + self.timeout

    def interrupt(self) -> None:
        self.batch.interrupt(self)

    def end(self) -> None:
        """Its outcome is decided."""
        self.has_ended = True
        self.batch.left -= 1

    def give_up(self) -> None:
        self.is_given_up = True
        self.end()
        self.batch.given_up(self)


class ItemRuns(Protocol):
    """Runs the items of calls: the pool's running tasks."""

    def begin_item(self, run: BatchRun, call: BatchCall) -> Item | None:
        """Bring the run to its call; None if that may have to wait for something, or fails."""

    async def execute_item(self, run: BatchRun, call: BatchCall) -> None:
        """Run it from its beginning to its end, with what may have to be waited for."""

    def end_item(self, run: BatchRun, item: Item) -> Coroutine[Any, Any, None] | None:
        """End a run that `begin_item` has begun; returns the rest if that has to wait for something."""


class OpenBatch:
    """Claimed tasks of one function and queue, collected for a call; later, the runs of the call."""

    def __init__(
        self,
        callee: Callee,
        task: Task,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
    ) -> None:
        assert callee.batch is not None
        self.callee = callee
        self.size, self.wait = callee.batch.size, callee.batch.wait
        self._queue = task.queue
        self._runnable = Runnable(names=frozenset({task.func_path}))
        self._wake = wake
        self.runs: list[BatchRun] = []
        self.left = 0
        """How many of its runs have no outcome yet."""
        self.closed: asyncio.Future[None] = loop.create_future()
        """Done when it takes no more tasks."""
        self.has_begun = False
        """Whether its first call has begun."""
        self._loop = loop
        self._wants = True
        self._expected = 0
        self._answer: asyncio.Future[None] = loop.create_future()
        self._called: list[BatchRun] = []
        self._job: asyncio.Task[None] | None = None
        self._abandoned: asyncio.Future[None] = loop.create_future()
        self._stops = 0

    # Collecting

    @property
    def missing(self) -> int:
        """How many tasks to claim for it now."""
        if not self._wants or self.closed.done():
            return 0
        return max(0, self.size - len(self.runs))

    @property
    def has_room(self) -> bool:
        return not self.closed.done() and len(self.runs) < self.size

    @property
    def is_answered(self) -> bool:
        """Whether it neither wants a claim nor waits for one."""
        return self._answer.done()

    def add(self, run: BatchRun) -> None:
        self.runs.append(run)
        self.left += 1
        if len(self.runs) >= self.size:
            finish(self.closed)

    def claim(self, most: int) -> Order:
        """What to claim for it. Until `claim_ended` it stays open."""
        self._wants = False
        self._expected += 1
        return Order(most, (self._queue,), self._runnable)

    def claim_ended(self) -> None:
        """The claim has returned, or failed. What it has brought is added now."""
        self._loop.call_soon(self._claim_ended)

    def _claim_ended(self) -> None:
        self._expected -= 1
        self.claim_needless()
        self._wake()

    def claim_needless(self) -> None:
        """Nothing can be claimed now."""
        self._wants = False
        if not self._expected:
            finish(self._answer)

    async def until_complete(self, clock: Clock) -> None:
        """Return when it is full, was closed, or has waited long enough and no claim for it is under way."""
        end = clock.monotonic() + self.wait
        pause = max(_SHORTEST_LOOK, self.wait / _LOOKS)
        while not self.closed.done():
            await asyncio.wait((self._answer, self.closed), return_when=asyncio.FIRST_COMPLETED)
            left = end - clock.monotonic()
            if self.closed.done() or left <= 0:
                break
            await clock.wait(self.closed, min(left, pause))
            if not self.closed.done() and left > pause:
                self._wants, self._answer = True, self._loop.create_future()
                self._wake()
        finish(self.closed)

    # Calling

    def calls(self) -> list[list[BatchRun]]:
        """Divide the runs among calls: tasks that have failed before run in smaller ones.

        An item on which the function fails as a whole is so soon alone, and the others succeed without it.
        """
        levels: dict[int, list[BatchRun]] = {}
        for run in self.runs:
            levels.setdefault(run.task.attempts + run.task.crashes, []).append(run)
        calls = []
        for failures, equal in sorted(levels.items()):
            size = max(1, self.size // _FALLS_BY**failures)
            calls += [equal[start : start + size] for start in range(0, len(equal), size)]
        return calls

    async def call(
        self, runs: Sequence[BatchRun], now: float, work: Coroutine[Any, Any, None]
    ) -> None:
        """Run one call to its end, or until all its runs have been given up."""
        self._called, self._stops = list(runs), 0
        self._job = job = self._loop.create_task(work)
        for run in runs:
            run.begin(now, job)
        await asyncio.wait((job, self._abandoned), return_when=asyncio.FIRST_COMPLETED)
        if self._abandoned.done():
            self._abandoned = self._loop.create_future()

    def interrupt(self, run: BatchRun) -> None:
        """Stop the call when all its runs are to stop: one alone only loses its outcome."""
        others = [each.stops for each in self._called if not each.has_ended]
        if self._job is not None and min(others, default=0) > self._stops:
            self._stops += 1
            self._job.cancel(run.stop_reason)

    def given_up(self, run: BatchRun) -> None:
        """Make room for another task; or end the call if none of its runs waits for it any more."""
        if not self.closed.done():
            self.runs.remove(run)
        if self._job is not None and all(run.has_ended for run in self._called):
            abandon(self._job, has_begun=True)
            finish(self._abandoned)


class Batches:
    """The batches of a pool: those that are collected, and those that run."""

    def __init__(
        self,
        execution: Execution,
        clock: Clock,
        wake: Callable[[], None],
        runs: ItemRuns,
    ) -> None:
        """`wake` has the claim loop look for batches that want tasks."""
        self._execution = execution
        self._clock = clock
        self._wake = wake
        self._runs = runs
        self._loop = asyncio.get_running_loop()
        # Not the context of a task: what belongs to that must not leak into the call.
        self._context = copy_context()
        self._open: dict[tuple[str, str], OpenBatch] = {}
        self._all: dict[OpenBatch, asyncio.Task[None]] = {}
        self.largest = 0
        """The size of the largest batch so far."""

    @property
    def shared_slots(self) -> int:
        """How many running tasks have no slot of their own, since their batch has one."""
        return sum(max(0, batch.left - 1) for batch in self._all)

    @property
    def are_collected(self) -> bool:
        """Whether a batch is open."""
        return bool(self._open)

    @property
    def are_full(self) -> bool:
        """Whether a batch is to be called in this turn of the event loop or the next ones."""
        return any(not batch.has_begun and batch.closed.done() for batch in self._all)

    def open_for(self, task: Task, callee: Callee) -> OpenBatch:
        """The batch that takes the task."""
        key = (task.func_path, task.queue)
        batch = self._open.get(key)
        if batch is None or not batch.has_room:
            batch = self._open[key] = OpenBatch(callee, task, self._loop, self._wake)
            self.largest = max(self.largest, batch.size)
            self._all[batch] = self._loop.create_task(
                self._run(key, batch), context=self._context.copy()
            )
            self._wake()
        return batch

    def to_fill(self, can_claim: bool, *, is_draining: bool) -> OpenBatch | None:
        """A batch that wants more tasks.

        If nothing can be claimed now, none waits for a claim. In a pool that drains, those for which the
        last claim has found too few tasks are called: nothing else will come.
        """
        for batch in list(self._open.values()):
            if not can_claim:
                batch.claim_needless()
            elif is_draining and batch.is_answered:
                finish(batch.closed)
        return next((batch for batch in self._open.values() if batch.missing), None)

    def take_collected(self) -> list[BatchRun]:
        """The runs of all open batches, which take no more."""
        for batch in self._open.values():
            finish(batch.closed)
        return [run for batch in self._open.values() for run in batch.runs if not run.has_ended]

    async def _run(self, key: tuple[str, str], batch: OpenBatch) -> None:
        try:
            await batch.until_complete(self._clock)
            if self._open.get(key) is batch:
                del self._open[key]
            for runs in batch.calls():
                called = [run for run in runs if not run.has_ended]
                if called:
                    now = self._clock.monotonic()
                    await batch.call(called, now, self._call(batch, called))
        finally:
            del self._all[batch]
            self._wake()

    async def _call(self, batch: OpenBatch, runs: Sequence[BatchRun]) -> None:
        """Bring each run to the call, make it, and bring each run to its end.

        A run is an asyncio task only where it may have to wait for something alone.
        """
        batch.has_begun = True
        self._wake()
        call = self._execution.batch_call(batch.callee)
        jobs: dict[str, asyncio.Task[None]] = {}
        begun: list[tuple[BatchRun, Item]] = []
        for run in runs:
            item = None
            if not self._execution.has_middleware:
                item = self._runs.begin_item(run, call)
            if item is not None:
                begun.append((run, item))
                continue
            task_id = run.task.id
            call.wait_for(run.task)
            work = self._runs.execute_item(run, call)
            jobs[task_id] = job = self._loop.create_task(work, context=self._context.copy())
            job.add_done_callback(partial(_leave, call, task_id))
        await call.run()
        for run, item in begun:
            rest = self._runs.end_item(run, item)
            if rest is not None:
                jobs[run.task.id] = self._loop.create_task(rest)
        if isinstance(call.error, asyncio.CancelledError):
            for task_id, job in jobs.items():
                if call.is_missing(task_id):
                    job.cancel(*call.error.args)
        await _ended(jobs.values())


def _leave(call: BatchCall, task_id: str, _: asyncio.Task[None]) -> None:
    call.leave(task_id)


async def _ended(jobs: Iterable[asyncio.Task[None]]) -> None:
    """Wait for the end of all; when cancelled, cancel them and wait on."""
    while left := [job for job in jobs if not job.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            for job in left:
                job.cancel(*error.args)
