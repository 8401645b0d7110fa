"""What a task sees of its checkpoint: finished steps to look up, iterations to go on with."""

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

from omniq.errors import InvalidTask, OmniqError
from omniq.models import check_int, check_key
from omniq.serialization import Serializer
from omniq.tasks.steps import (
    Kept,
    Mark,
    Notebook,
    Reach,
    decode_value,
    driven,
    encode_value,
    has_loop,
)

T = TypeVar("T")

Items = Iterable[T] | AsyncIterable[T]
Source = Items[T] | Callable[[T | None], Items[T]]
"""What to iterate over, or a function that gives it: all that comes after the item it is given."""


class Checkpoint(Mapping[str, Any]):
    """The steps that are finished, by name, with their results. Of this run and of earlier ones.

    `await` it before it is used in an async task that has had no step yet; elsewhere it is loaded
    when it is first looked at.
    """

    def __init__(self, reach: Reach, serializer: Serializer, book: Notebook | None) -> None:
        self._reach = reach
        self._serializer = serializer
        self._book = book

    def __await__(self) -> Generator[Any, None, Checkpoint]:
        return self._loaded().__await__()

    def __getitem__(self, step: str) -> Any:
        return decode_value(self._serializer, self._kept().steps[step])

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._kept().steps))

    def __len__(self) -> int:
        return len(self._kept().steps)

    def __repr__(self) -> str:
        return f"Checkpoint({list(self)})"

    async def _loaded(self) -> Checkpoint:
        async def load(book: Notebook) -> Notebook:
            await book.open()
            return book

        self._book = await self._reach(load)
        return self

    def _kept(self) -> Kept:
        if self._book is None or self._book.kept is None:
            if has_loop():
                raise OmniqError("use 'await ctx.checkpoint' first: it may have to be loaded")
            driven(self._loaded())
        kept = None if self._book is None else self._book.kept
        assert kept is not None
        return kept


class Cursor(Generic[T]):
    """An iteration that goes on, in a later run, after the last item that was finished.

    An item is finished when the next one is asked for. That is saved with every `every`-th item,
    at the end, and when the run fails; after a crash up to `every` items come once more.
    """

    def __init__(
        self, reach: Reach, serializer: Serializer, name: str, items: Source[T], every: int
    ) -> None:
        check_key("cursor name", name)
        check_int("every", every, low=1)
        self._reach = reach
        self._serializer = serializer
        self._name = name
        self._items = items
        self._every = every
        self._is_asked = callable(items)
        self._book: Notebook

    def __iter__(self) -> Iterator[T]:
        if has_loop():
            raise InvalidTask(f"cursor {self._name!r}: use 'async for' in an async task")
        mark = driven(self._reach(self._open))
        if mark.has_ended:
            return
        items = self._rest(mark)
        if not isinstance(items, Iterable):
            raise InvalidTask(f"cursor {self._name!r}: only async tasks iterate over this")
        for item in islice(items, 0 if self._is_asked else mark.count, None):
            yield item
            mark = driven(self._step_past(item, mark))
        driven(self._end(mark))

    async def __aiter__(self) -> AsyncIterator[T]:
        mark = await self._reach(self._open)
        if mark.has_ended:
            return
        skip = 0 if self._is_asked else mark.count
        async for item in _async_items(self._rest(mark)):
            if skip:
                skip -= 1
                continue
            yield item
            mark = await self._step_past(item, mark)
        await self._end(mark)

    def _rest(self, mark: Mark) -> Items[T]:
        if not callable(self._items):
            return self._items
        last = None if mark.last is None else decode_value(self._serializer, mark.last)
        return self._items(last)

    async def _open(self, book: Notebook) -> Mark:
        self._book = book
        return await book.mark(self._name)

    async def _step_past(self, item: T, mark: Mark) -> Mark:
        last = encode_value(self._serializer, self._name, item) if self._is_asked else None
        moved = Mark(mark.count + 1, last)
        self._book.move(self._name, moved)
        if moved.count % self._every == 0:
            await self._reach(Notebook.flush)
        return moved

    async def _end(self, mark: Mark) -> None:
        self._book.move(self._name, Mark(mark.count, None, has_ended=True))
        await self._reach(Notebook.flush)


async def _async_items(items: Items[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
