"""Read batcher: combines reads of single tasks that arrive while another read is running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ReadBatcher(Generic[_T]):
    """Reads values by task id, many ids with one call of `read_many`.

    Every caller gets a value that was read after its own call began. Used on one event loop.
    """

    def __init__(self, read_many: Callable[[list[str]], Awaitable[dict[str, _T]]]) -> None:
        self._read_many = read_many
        self._waiting: dict[str, asyncio.Future[_T | None]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def get(self, task_id: str) -> _T | None:
        """Return the value for the id, or None when there is none."""
        value = self._waiting.get(task_id)
        if value is None:
            value = self._waiting[task_id] = asyncio.get_running_loop().create_future()
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_until_idle())
        # Shielded, because other callers may wait for the same value.
        return await asyncio.shield(value)

    async def _read_until_idle(self) -> None:
        try:
            while self._waiting:
                await self._read_waiting()
        finally:
            self._reading = None

    async def _read_waiting(self) -> None:
        batch, self._waiting = self._waiting, {}
        try:
            values = await self._read_many(list(batch))
        except BaseException as error:
            for future in batch.values():
                future.set_exception(error)
                # Marks the exception as retrieved: the caller may have been cancelled meanwhile.
                future.exception()
            if not isinstance(error, Exception):
                raise
            return
        for task_id, future in batch.items():
            future.set_result(values.get(task_id))
