"""What a task can read of its checkpoint: the results of finished steps, and resumable cursors."""

from __future__ import annotations

from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from itertools import islice
from typing import Any, Generic, TypeVar

from omniq.concurrency.coroutines import run_without_loop
from omniq.concurrency.event_loop import has_event_loop
from omniq.errors import InvalidTask, OmniqError
from omniq.models import check_int, check_key
from omniq.serialization import Serializer
from omniq.tasks.steps import (
    PLACE,
    CheckpointAccess,
    CheckpointData,
    CursorPosition,
    RunCheckpoint,
    decode_value,
    encode_value,
)

T = TypeVar("T")

Items = Iterable[T] | AsyncIterable[T]
Source = Items[T] | Callable[[T | None], Items[T]]
"""The items, or a function that returns the items after the one that it is given."""


class Checkpoint(Mapping[str, Any]):
    """The results of the finished steps by name, of this run and of earlier ones.

    In an async task, `await` it before the first use if no step has run yet. In other tasks the
    first use loads it.
    """

    def __init__(
        self, access: CheckpointAccess, serializer: Serializer, run: RunCheckpoint | None
    ) -> None:
        self._access = access
        self._serializer = serializer
        self._run = run

    def __await__(self) -> Generator[Any, None, Checkpoint]:
        return self._load().__await__()

    def __getitem__(self, step: str) -> Any:
        return decode_value(self._serializer, self._data().steps[step])

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._data().steps))

    def __len__(self) -> int:
        return len(self._data().steps)

    def __repr__(self) -> str:
        return f"Checkpoint({list(self)})"

    async def _load(self) -> Checkpoint:
        async def load(run: RunCheckpoint) -> RunCheckpoint:
            await run.load()
            return run

        self._run = await self._access(load)
        return self

    def _data(self) -> CheckpointData:
        if self._run is None or self._run.data is None:
            if has_event_loop():
                raise OmniqError("use 'await ctx.checkpoint' first: it may have to be loaded")
            run_without_loop(self._load())
        data = None if self._run is None else self._run.data
        assert data is not None
        return data


class Cursor(Generic[T]):
    """An iteration that a later run resumes after the last item that was finished.

    An item is finished when the next one is requested. The position is saved after every `every`
    items, at the end, and when the run fails; after a crash up to `every` items are repeated.
    """

    def __init__(
        self,
        access: CheckpointAccess,
        serializer: Serializer,
        name: str,
        items: Source[T],
        every: int,
    ) -> None:
        check_key("cursor name", name)
        check_int("every", every, low=1)
        self._access = access
        self._serializer = serializer
        self._name = name
        self._items = items
        self._every = every
        self._resumes_after_item = callable(items)
        self._run: RunCheckpoint

    def __iter__(self) -> Iterator[T]:
        if has_event_loop():
            raise InvalidTask(f"cursor {self._name!r}: use 'async for' in an async task")
        position = run_without_loop(self._access(self._open))
        if position.has_ended:
            return
        items = self._items_after(position)
        if not isinstance(items, Iterable):
            raise InvalidTask(f"cursor {self._name!r}: only async tasks iterate over this")
        outer = PLACE.get()
        try:
            for item in islice(items, 0 if self._resumes_after_item else position.count, None):
                PLACE.set((self._name, position.count))
                yield item
                position = run_without_loop(self._step_past(item, position))
        finally:
            PLACE.set(outer)
        run_without_loop(self._end(position))

    async def __aiter__(self) -> AsyncIterator[T]:
        position = await self._access(self._open)
        if position.has_ended:
            return
        skip = 0 if self._resumes_after_item else position.count
        outer = PLACE.get()
        try:
            async for item in _async_items(self._items_after(position)):
                if skip:
                    skip -= 1
                    continue
                PLACE.set((self._name, position.count))
                yield item
                position = await self._step_past(item, position)
        finally:
            PLACE.set(outer)
        await self._end(position)

    def _items_after(self, position: CursorPosition) -> Items[T]:
        if not callable(self._items):
            return self._items
        last = None if position.last is None else decode_value(self._serializer, position.last)
        return self._items(last)

    async def _open(self, run: RunCheckpoint) -> CursorPosition:
        self._run = run
        return await run.open_cursor(self._name)

    async def _step_past(self, item: T, position: CursorPosition) -> CursorPosition:
        last = None
        if self._resumes_after_item:
            last = encode_value(self._serializer, item)
        moved = CursorPosition(position.count + 1, last)
        self._run.move_cursor(self._name, moved)
        if moved.count % self._every == 0:
            await self._access(RunCheckpoint.flush)
        return moved

    async def _end(self, position: CursorPosition) -> None:
        self._run.move_cursor(self._name, CursorPosition(position.count, None, has_ended=True))
        await self._access(RunCheckpoint.flush)


async def _async_items(items: Items[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
