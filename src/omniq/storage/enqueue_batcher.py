"""Natural batching of enqueues: what is asked for while one is being written is written together.

Nothing waits for a timer: a caller who is alone has the latency of a single write, and of many
callers each pays a small part of one. For backends on a server, where a write is a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from omniq.errors import OmniqError, StorageError, StorageRefused
from omniq.storage.row_rules import Row

_MOST_ROWS, _MOST_BYTES = 1_000, 1 << 22
"""What one write takes of several callers, so that nobody waits long for the others."""


class _Call:
    """The rows of one caller, and who waits for their ids."""

    __slots__ = ("answer", "rows", "size")

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.size = sum(len(row.body) for row in rows)
        self.answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    def tell(self, ids: list[str]) -> None:
        if not self.answer.done():
            self.answer.set_result(ids)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Enqueues:
    """Has the rows of many callers written, in the order they came. Used on one event loop.

    `write` keeps all rows it is given or raises, and may be given rows of several calls, never two
    with one id. Each caller gets the answer to its own call: a batch that is refused is written
    anew, call by call. A caller that is cancelled before its rows are on their way enqueues nothing.

    With two `lanes` a write begins while another is under way: the server works on the one while
    callers prepare the next. They must arrive in the order in which they were begun.
    """

    def __init__(
        self, write: Callable[[list[Row]], Awaitable[list[str]]], *, lanes: int = 1
    ) -> None:
        self._write = write
        self._waiting: deque[_Call] = deque()
        self._free_lanes = self._lanes = lanes
        self._under_way = 0
        self._is_crowded = False
        self._writers: set[asyncio.Task[None]] = set()

    async def add(self, rows: list[Row]) -> list[str]:
        """The ids that now stand for the rows."""
        if self._is_crowded or self._free_lanes < self._lanes:
            call = _Call(rows)
            self._waiting.append(call)
            self._start_writing()
            return await call.answer
        # Alone: without the detour of a task of its own.
        self._free_lanes -= 1
        self._under_way += 1
        try:
            return await self._write(rows)
        finally:
            self._free_lanes += 1
            self._under_way -= 1
            if self._waiting:
                self._start_writing()

    def _start_writing(self) -> None:
        """It begins when all who are about to ask, those just answered above all, have asked."""
        if self._free_lanes:
            self._free_lanes -= 1
            writer = asyncio.get_running_loop().create_task(self._write_waiting())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    async def _write_waiting(self) -> None:
        try:
            while calls := self._next_calls():
                self._is_crowded = len(calls) > 1
                self._under_way += 1
                try:
                    await self._write_together(calls)
                finally:
                    self._under_way -= 1
        except BaseException:
            # The event loop is coming to its end.
            while self._waiting:
                self._waiting.popleft().answer.cancel()
            raise
        finally:
            self._free_lanes += 1

    def _next_calls(self) -> list[_Call]:
        """Those who have waited longest: as many as fit into one write, and as are not for others."""
        calls: list[_Call] = []
        ids: set[str] = set()
        size = 0
        left_to_others = len(self._waiting) * (1 - 1 / (self._lanes - self._under_way))
        while self._waiting and (not calls or len(self._waiting) > left_to_others):
            call = self._waiting[0]
            own = {row.id for row in call.rows}
            size += call.size
            # A second call with an id has to find what the first one left.
            is_next = ids.isdisjoint(own) and len(ids) + len(own) <= _MOST_ROWS
            if calls and not (is_next and size <= _MOST_BYTES):
                break
            self._waiting.popleft()
            if not call.answer.done():
                calls.append(call)
                ids |= own
        return calls

    async def _write_together(self, calls: list[_Call]) -> None:
        try:
            ids = await self._write([row for call in calls for row in call.rows])
        except Exception as error:
            is_refused = isinstance(error, StorageRefused) or not isinstance(error, StorageError)
            if len(calls) > 1 and is_refused and isinstance(error, OmniqError):
                await self._write_singly(calls)
                return
            for call in calls:
                call.fail(error)
        except BaseException:
            for call in calls:
                call.answer.cancel()
            raise
        else:
            start = 0
            for call in calls:
                call.tell(ids[start : start + len(call.rows)])
                start += len(call.rows)

    async def _write_singly(self, calls: list[_Call]) -> None:
        try:
            for call in calls:
                if not call.answer.done():
                    await self._write_together([call])
        except BaseException:
            for call in calls:
                call.answer.cancel()
            raise
