"""Batching of enqueues: calls that arrive while a write is in progress are written together.

There is no timer. A single caller has the latency of one write; concurrent callers share the cost
of a write. For backends on a server, where a write is a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from omniq.concurrency.futures import set_result
from omniq.errors import OmniqError, StorageError, StorageRefused
from omniq.storage.row_rules import Row

_MAX_ROWS, _MAX_BYTES = 1_000, 1 << 22
"""The largest write that combines several calls, so that no caller waits long for the others."""


class _Call:
    """The rows of one caller, and the future on which it waits for their ids."""

    __slots__ = ("ids", "rows", "size")

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.size = sum(len(row.body) for row in rows)
        self.ids: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.ids.done():
            self.ids.set_exception(error)


class EnqueueBatcher:
    """Writes the rows of many callers, in the order of their calls. Used on one event loop.

    `write` stores all rows it is given or raises. It may be given the rows of several calls, but
    never two rows with the same id. Each caller gets the result of its call: a batch that is
    refused is written again, in halves. A caller that is cancelled before its rows are written
    enqueues nothing.

    With `concurrent_writes=2`, a write begins while another is in progress: the server executes one
    while callers prepare the next. Writes must reach the store in the order in which they began.
    """

    def __init__(
        self, write: Callable[[list[Row]], Awaitable[list[str]]], *, concurrent_writes: int = 1
    ) -> None:
        self._write = write
        self._waiting: deque[_Call] = deque()
        # A slot is taken from the moment a write is planned; `_writing` counts those that began.
        self._free_slots = self._slots = concurrent_writes
        self._writing = 0
        self._had_concurrent_calls = False
        self._writers: set[asyncio.Task[None]] = set()

    async def add(self, rows: list[Row]) -> list[str]:
        """Enqueue the rows; return the id of the task that now represents each."""
        if self._had_concurrent_calls or self._free_slots < self._slots:
            call = _Call(rows)
            self._waiting.append(call)
            self._start_writer()
            return await call.ids
        # The only caller: write directly, without an asyncio task.
        self._free_slots -= 1
        self._writing += 1
        try:
            return await self._write(rows)
        finally:
            self._free_slots += 1
            self._writing -= 1
            if self._waiting:
                self._start_writer()

    def _start_writer(self) -> None:
        """Start a writer task if a slot is free.

        The task begins at a later turn of the event loop, after the callers that are about to call
        `add`, above all those that just received their ids, have done so.
        """
        if self._free_slots:
            self._free_slots -= 1
            writer = asyncio.get_running_loop().create_task(self._write_waiting())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    async def _write_waiting(self) -> None:
        try:
            while calls := self._next_calls():
                self._had_concurrent_calls = len(calls) > 1
                self._writing += 1
                try:
                    await self._write_together(calls)
                finally:
                    self._writing -= 1
        except BaseException:
            # The event loop is shutting down.
            while self._waiting:
                self._waiting.popleft().ids.cancel()
            raise
        finally:
            self._free_slots += 1

    def _next_calls(self) -> list[_Call]:
        """Take the oldest calls: as many as fit into one write, leaving the other slots a share."""
        calls: list[_Call] = []
        ids: set[str] = set()
        size = 0
        left_to_others = len(self._waiting) * (1 - 1 / (self._slots - self._writing))
        while self._waiting and (not calls or len(self._waiting) > left_to_others):
            call = self._waiting[0]
            own = {row.id for row in call.rows}
            size += call.size
            # A second call with the same id must see the result of the first.
            fits = ids.isdisjoint(own) and len(ids) + len(own) <= _MAX_ROWS
            if calls and not (fits and size <= _MAX_BYTES):
                break
            self._waiting.popleft()
            if not call.ids.done():
                calls.append(call)
                ids |= own
        return calls

    async def _write_together(self, calls: list[_Call]) -> None:
        try:
            ids = await self._write([row for call in calls for row in call.rows])
        except Exception as error:
            is_refused = isinstance(error, StorageRefused) or not isinstance(error, StorageError)
            if len(calls) > 1 and is_refused and isinstance(error, OmniqError):
                await self._write_halves(calls)
                return
            for call in calls:
                call.fail(error)
        except BaseException:
            for call in calls:
                call.ids.cancel()
            raise
        else:
            start = 0
            for call in calls:
                set_result(call.ids, ids[start : start + len(call.rows)])
                start += len(call.rows)

    async def _write_halves(self, calls: list[_Call]) -> None:
        """Write a refused batch again; in halves, because of many calls few are refused."""
        middle = len(calls) // 2
        try:
            for half in (calls[:middle], calls[middle:]):
                waiting = [call for call in half if not call.ids.done()]
                if waiting:
                    await self._write_together(waiting)
        except BaseException:
            for call in calls:
                call.ids.cancel()
            raise
