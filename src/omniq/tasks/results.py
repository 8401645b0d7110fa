"""`Results`: the results of very many tasks, as an argument of a function that reads them in pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from omniq.concurrency.coroutines import run_without_loop
from omniq.concurrency.event_loop import has_event_loop
from omniq.errors import InvalidTask, SerializationError
from omniq.tasks.converters import Converter, refuse
from omniq.tasks.steps import run_on_loop_of

if TYPE_CHECKING:
    from omniq.tasks.steps import WorkerServices

T = TypeVar("T")
U = TypeVar("U")

ReadPage = Callable[[str], Awaitable[tuple[list[Any], str]]]
"""Reads the values after an id, and returns the id to go on after: '' at the end."""


class Results(Generic[T]):
    """The results of the members of a map, in order, which are read in pages.

    Use it as the type of a parameter, and pass `Results.of(…)` to it:

        @task
        async def add_up(sizes: Results[int]) -> int:
            return sum([size async for size in sizes])

        flow.add("sum", add_up, Results.of(flow.map("size", measure, words)))

    `async for` reads the results in a coroutine, `for` in any other function. Each loop begins with the first.
    """

    __slots__ = ("_item", "_read", "_values", "group_id")

    def __init__(self, values: Iterable[T], *, group_id: str = "", read: ReadPage | None = None):
        self._values = values
        self.group_id = group_id
        """The id of the record whose results these are; empty if they are values."""
        self._read = read
        self._item: Converter | None = None

    @staticmethod
    def of(values: Iterable[U]) -> Results[U]:
        """The results that `flow.map` or `flow.add` has returned a placeholder for, or a list of values."""
        return Results(values)

    @property
    def values(self) -> Iterable[T]:
        """What `of` was called with."""
        return self._values

    def converted(self, item: Converter) -> Results[T]:
        """These results, each as the annotation says."""
        results = Results(self._values, group_id=self.group_id, read=self._read)
        results._item = item
        return results

    async def __aiter__(self) -> AsyncIterator[T]:
        after: str | None = None
        while after != "":
            values, after = await self._page(after or "")
            for value in values:
                yield value

    def __iter__(self) -> Iterator[T]:
        if self._read is not None and has_event_loop():
            raise InvalidTask(
                "Results: use `async for` in a coroutine; `for` would block its event loop"
            )
        after: str | None = None
        while after != "":
            values, after = run_without_loop(self._page(after or ""))
            yield from values

    async def _page(self, after: str) -> tuple[list[T], str]:
        if self._read is None:
            return list(self._values), ""
        values, after = await self._read(after)
        item = self._item
        if item is not None:
            values = [item.load(value, "result") for value in values]
        return cast("list[T]", values), after

    def __repr__(self) -> str:
        return f"Results({self.group_id or self._values!r})"


def stored_results(group_id: str, services: WorkerServices) -> Results[Any]:
    """The results of the members of a group, or the items of the result of another record."""

    async def read(after: str) -> tuple[list[Any], str]:
        return await run_on_loop_of(services, services.flows.values_page(group_id, after))

    return Results((), group_id=group_id, read=read)


class ResultsOf:
    """The converter of a parameter that is annotated `Results[T]`."""

    is_plain = False

    def __init__(self, item: Converter) -> None:
        self.name = f"Results[{item.name}]"
        self._item = item

    def dump(self, value: Any, where: str) -> Any:
        values = value.values if isinstance(value, Results) else value
        if not isinstance(values, list | tuple | range):
            refuse(value, self, where)
        return [self._item.dump(each, f"{where}[{n}]") for n, each in enumerate(values)]

    def load(self, value: Any, where: str, *, exact: bool = False) -> Any:
        if isinstance(value, Results):
            return value.converted(self._item)
        if not isinstance(value, list | tuple):
            raise SerializationError(
                f"expected {self.name}, got {type(value).__name__}", path=where
            )
        load = self._item.load
        return Results([load(each, f"{where}[{n}]", exact=exact) for n, each in enumerate(value)])
