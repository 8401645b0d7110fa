"""Collects the output of the tasks that run here, and stores it in batches.

All tasks share one write, a moment after the first chunk; a run that ends waits for the write of its last chunks.
Without output nothing is written. While the storage does not answer, at most `max_output_chunks` and
`max_output_bytes` are kept in memory of each run, the newest.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence

from omniq.concurrency.backoff import backoff
from omniq.concurrency.futures import finish
from omniq.models import Task
from omniq.storage.base import BaseStorage
from omniq.tasks.task_output import OutputBatch, StoredChunk
from omniq.worker.problems import ProblemReports

_INTERVAL, _SLOW_INTERVAL = 0.2, 1.0
"""Seconds that chunks are collected before they are stored; longer where a write costs more."""

_PAUSES_PER_WRITE, _LONGEST_INTERVAL = 20, 1.0
"""A pause is at least this many times as long as the last write: output leaves a slow storage to the tasks."""

_ROOM_CHUNKS, _ROOM_BYTES = 2_000, 262_144
"""What a run may have in memory before `ctx.stream` waits: chunks or bytes that are not stored yet."""

_MOST_BYTES = 524_288
"""Bytes of one write, about."""

_LONGEST_WAIT = 1.0
"""Seconds that `ctx.stream` waits for room. A task goes on without it: it must not depend on its readers."""

_LAST_WAIT = 5.0
"""Seconds that the outcome of a run waits until its output is stored."""

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 2.0


class _RunOutput:
    """The chunks of one run that are not stored yet; `first` is the number of the first one of them."""

    __slots__ = ("chunks", "first", "size", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.chunks: deque[StoredChunk] = deque()
        self.first = 1
        self.size = 0

    @property
    def has_room(self) -> bool:
        return len(self.chunks) < _ROOM_CHUNKS and self.size < _ROOM_BYTES

    def drop_first(self) -> None:
        self.size -= len(self.chunks.popleft().data)
        self.first += 1

    def batch(self, most_bytes: int) -> OutputBatch:
        chunks: list[StoredChunk] = []
        for chunk in self.chunks:
            most_bytes -= len(chunk.data)
            if chunks and most_bytes < 0:
                break
            chunks.append(chunk)
        task = self.task
        return OutputBatch(
            task_id=task.id,
            token=task.token,
            attempt=task.attempts + task.crashes + 1,
            first=self.first,
            chunks=chunks,
        )


class OutputWriter:
    """Tasks add chunks from any thread; `run` stores them on the event loop that this is made in."""

    def __init__(self, storage: BaseStorage, problems: ProblemReports) -> None:
        self._storage, self._clock = storage, storage.clock
        self._problems = problems
        self._least = _SLOW_INTERVAL if storage.capabilities.slow_writes else _INTERVAL
        self._interval = self._least
        settings = storage.settings
        self._max_chunks, self._max_bytes = settings.max_output_chunks, settings.max_output_bytes
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.runs: dict[tuple[str, int], _RunOutput] = {}
        """The runs that have made output and have not ended."""
        self._is_wanted = False
        self._wanted, self._hurry = self._future(), self._future()
        self._round = self._future()
        self._failures = 0
        self._is_closed = False
        self.waiting = 0
        """How many runs wait for a storage that does not answer."""

    def _future(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    def add(self, task: Task, data: bytes) -> bool:
        """Hold a chunk until it is stored; returns whether there is room for more. From any thread."""
        chunk = StoredChunk(self._clock.micros(), data)
        with self._lock:
            run = self.runs.get((task.id, task.token))
            if run is None:
                run = self.runs[task.id, task.token] = _RunOutput(task)
            run.chunks.append(chunk)
            run.size += len(data)
            while len(run.chunks) > self._max_chunks or run.size > self._max_bytes:
                run.drop_first()
            has_room = run.has_room
            is_first, self._is_wanted = not self._is_wanted, True
        if is_first or not has_room:
            self._wake(is_urgent=not has_room)
        return has_room

    async def wait_for_room(self, task: Task) -> None:
        """Return when the run may add more, or after a moment. On the loop."""
        run = self.runs.get((task.id, task.token))
        # Of a storage that does not answer only the newest chunks will be stored.
        if run is None or run.has_room or self._failures or self._is_closed:
            return
        finish(self._hurry)
        await self._clock.wait(self._round, _LONGEST_WAIT)

    async def flush(self, task: Task) -> None:
        """Return when all chunks that the run has made are stored, or cannot be for now. On the loop."""
        end = self._clock.monotonic() + _LAST_WAIT
        while (run := self.runs.get((task.id, task.token))) is not None and run.chunks:
            left = end - self._clock.monotonic()
            if left <= 0 or self._is_closed:
                return
            finish(self._hurry)
            is_failing = self._failures > 0
            self.waiting += is_failing
            try:
                await self._clock.wait(self._round, left)
            finally:
                self.waiting -= is_failing

    def forget(self, task: Task) -> None:
        """Drop what a run has that is not stored: it has ended."""
        with self._lock:
            self.runs.pop((task.id, task.token), None)

    async def run(self) -> None:
        """Store what the tasks output, a moment after the first chunk."""
        while True:
            await self._wanted
            pause = self._interval
            if self._failures:
                pause = backoff(self._failures, first=_FIRST_BACKOFF, longest=_LONGEST_BACKOFF)
                await self._clock.sleep(pause)
            else:
                await self._clock.wait(self._hurry, pause)
            await self._store()

    async def store_rest(self) -> None:
        """Store what there is, once: the worker stops."""
        self._is_closed = True
        if self.runs:
            await self._store()

    async def _store(self) -> None:
        batches = self._take()
        if batches:
            began = self._clock.monotonic()
            try:
                accepted = await self._storage.append_output(batches)
            except Exception as error:
                self._failures += 1
                self._problems.report("output", error)
                self._end_round()
                return
            self._failures = 0
            took = self._clock.monotonic() - began
            self._interval = max(self._least, min(_PAUSES_PER_WRITE * took, _LONGEST_INTERVAL))
            self._drop_stored(batches, accepted)
        self._end_round()

    def _take(self) -> list[OutputBatch]:
        """What the next write stores: of each task the chunks of its newest run."""
        with self._lock:
            # What is added from now on asks for another write.
            self._is_wanted = False
            self._wanted, self._hurry = self._future(), self._future()
            newest = dict(sorted(self.runs))
            batches, left = list[OutputBatch](), _MOST_BYTES
            for (task_id, token), run in list(self.runs.items()):
                if token < newest[task_id]:
                    # Of a thread that an earlier run has left behind.
                    del self.runs[task_id, token]
                if token < newest[task_id] or not run.chunks or left <= 0:
                    continue
                batches.append(run.batch(left))
                left -= sum(len(chunk.data) for chunk in batches[-1].chunks)
            return batches

    def _drop_stored(self, batches: Sequence[OutputBatch], accepted: Sequence[bool]) -> None:
        with self._lock:
            for batch, is_stored in zip(batches, accepted, strict=True):
                key = (batch.task_id, batch.token)
                run = self.runs.get(key)
                if run is None:
                    continue
                if not is_stored:
                    # Another worker has the task.
                    del self.runs[key]
                    continue
                end = batch.first + len(batch.chunks)
                while run.chunks and run.first < end:
                    run.drop_first()

    def _end_round(self) -> None:
        """Wake those that wait for this write; begin the next one if there is more."""
        ended, self._round = self._round, self._future()
        finish(ended)
        with self._lock:
            is_left = any(run.chunks for run in self.runs.values())
            is_full = any(not run.has_room for run in self.runs.values())
            self._is_wanted = self._is_wanted or is_left
        if is_left:
            self._wake(is_urgent=is_full)

    def _wake(self, *, is_urgent: bool) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            self._wake_here(is_urgent)
            return
        try:
            self._loop.call_soon_threadsafe(self._wake_here, is_urgent)
        except RuntimeError:
            # The worker has ended, and left the thread of the task behind.
            return

    def _wake_here(self, is_urgent: bool) -> None:
        finish(self._wanted)
        if is_urgent:
            finish(self._hurry)
