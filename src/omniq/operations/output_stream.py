"""Follows the output of a task, page by page."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import ResultTimeout, TaskNotFound
from omniq.tasks.task_output import OutputChunk, OutputPosition

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage


class OutputStream:
    """The output of one task for one reader: what is there, and then what comes, until the task has ended.

    Without `all_runs` it goes on with the newest run as soon as that has output. Without `logs` it has the
    chunks of `ctx.stream` only.
    """

    def __init__(
        self,
        storage: BaseStorage,
        task_id: str,
        *,
        logs: bool = False,
        all_runs: bool = False,
        timeout: float | None = None,
        tail: int | None = None,
    ) -> None:
        self._storage, self._task_id = storage, task_id
        self._logs, self._all_runs, self._timeout = logs, all_runs, timeout
        self._tail = tail
        self._after: OutputPosition | None = None
        self._is_known = self._has_ended = False
        self._run = self._missed = 0

    async def next(self) -> list[OutputChunk] | None:
        """Wait for the next chunks; None when the task has ended and there are no more.

        Raises `TaskNotFound` when there is no record of the task, and `ResultTimeout` when no chunk comes in time.
        """
        while not self._has_ended:
            page = await self._wait()
            if page is None:
                if not self._is_known:
                    raise TaskNotFound(self._task_id)
                # Its record was not kept.
                return None
            self._is_known, self._after = True, page.after
            self._has_ended = page.is_final
            if not page.chunks and not page.is_final and self._timeout is not None:
                raise ResultTimeout(self._task_id, self._timeout, "it has made no output meanwhile")
            chunks = self._chosen(page.chunks)
            if chunks:
                return chunks
        return None

    async def _wait(self) -> Any:
        storage, task_id = self._storage, self._task_id
        if self._tail is not None:
            tail, self._tail = self._tail, None
            return await storage.read_output(task_id, all_runs=self._all_runs, tail=tail)
        return await storage.wait_for_output(
            task_id, self._after, all_runs=self._all_runs, timeout=self._timeout
        )

    def _chosen(self, chunks: Sequence[OutputChunk]) -> list[OutputChunk]:
        """The chunks that the reader wants; `missed` and `is_first` are those of this reader."""
        chosen: list[OutputChunk] = []
        for chunk in chunks:
            if chunk.is_first:
                self._missed = 0
            missed = self._missed + chunk.missed
            if chunk.level is not None and not self._logs:
                # Not one that is missed: the reader does not want it.
                self._missed = missed
                continue
            is_first, self._run, self._missed = chunk.run != self._run, chunk.run, 0
            if (missed, is_first) != (chunk.missed, chunk.is_first):
                chunk = msgspec.structs.replace(chunk, missed=missed, is_first=is_first)
            chosen.append(chunk)
        return chosen


class OutputIterator:
    """`async for` over the chunks of an `OutputStream`."""

    def __init__(
        self,
        stream: OutputStream,
        run: Callable[[Coroutine[Any, Any, list[OutputChunk] | None]], Any] | None = None,
    ) -> None:
        """`run` awaits the calls on another event loop."""
        self._stream = stream
        self._run = run
        self._ready: list[OutputChunk] = []

    def __aiter__(self) -> OutputIterator:
        return self

    async def __anext__(self) -> OutputChunk:
        if not self._ready:
            call = self._stream.next()
            found = await (call if self._run is None else self._run(call))
            if found is None:
                raise StopAsyncIteration
            self._ready = found[::-1]
        return self._ready.pop()
