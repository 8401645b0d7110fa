"""What every slice of the contract suite stands on: its fixtures, and the numbers of promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from omniq.models import Task, TaskStatus
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.testing.clock import ManualClock

# Before any slice is imported: only then does pytest show the values in a failed assertion.
pytest.register_assert_rewrite(
    *(f"{__package__}.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py"))
)

LEASE = Settings().lease
"""Seconds an owner's lease lasts, in storages opened without settings of their own."""

_Test = TypeVar("_Test", bound=Callable[..., Any])


class OpenAnother(Protocol):
    """Opens one more owner on the store under test; closed when the test ends."""

    async def __call__(
        self,
        *,
        settings: Settings | None = None,
        max_pending: int | None = None,
        serializer: Serializer | None = None,
    ) -> BaseStorage: ...


@asynccontextmanager
async def opener(make: Callable[..., BaseStorage]) -> AsyncIterator[OpenAnother]:
    """An `open_another` over a function that makes a storage; closes all it opened at the end.

    `make` is called with those of `settings`, `max_pending` and `serializer` that a test gives.
    """
    async with AsyncExitStack() as stack:

        async def open_another(
            *,
            settings: Settings | None = None,
            max_pending: int | None = None,
            serializer: Serializer | None = None,
        ) -> BaseStorage:
            given = {"settings": settings, "max_pending": max_pending, "serializer": serializer}
            chosen = {name: value for name, value in given.items() if value is not None}
            return await stack.enter_async_context(make(**chosen))

        yield open_another


def promise(*numbers: str) -> Callable[[_Test], _Test]:
    """Say which numbered promises of the contract a test checks."""

    def keep(test: _Test) -> _Test:
        test.__dict__["promises"] = numbers
        return test

    return keep


class Slice:
    """A part of the contract. A backend's class may add tests to it, and replace none."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
        replaced = sorted(
            name for name in vars(cls) if name.startswith("test_") and name in inherited
        )
        if replaced:
            raise TypeError(f"{cls.__name__} replaces tests of the contract: {', '.join(replaced)}")

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    async def storage(self, open_another: OpenAnother) -> BaseStorage:
        return await open_another()


def ids(tasks: Iterable[Task]) -> list[str]:
    """The ids, in order."""
    return [task.id for task in tasks]


async def claim_one(storage: BaseStorage) -> Task:
    """Claim the next task, which must be there."""
    (task,) = await storage.reserve(1)
    return task


async def claim_and_lose(
    open_another: OpenAnother, clock: ManualClock, limit: int = 1
) -> list[Task]:
    """Claim as an owner that then says no more, until its lease has ended."""
    lost = await open_another()
    claimed = await lost.reserve(limit)
    clock.advance(LEASE)
    return claimed


async def status_of(storage: BaseStorage, task_id: str) -> TaskStatus | None:
    """The task's status; None when there is no record of it."""
    task = await storage.get_task(task_id)
    return None if task is None else task.status


async def everything(storage: BaseStorage) -> dict[str, object]:
    """All that a reader can see of tasks whatever the time is, for comparing before and after."""
    tasks = await storage.list_tasks(limit=1000)
    letters = await storage.list_dead(limit=1000)
    counted = await storage.stats()
    return {
        "tasks": tasks,
        "results": [await storage.get_result(task.id) for task in tasks],
        "histories": [await storage.history(task.id) for task in tasks],
        "checkpoints": [await storage.load_checkpoint(task.id) for task in tasks],
        "dead": letters,
        "counts": (counted.by_status, counted.by_queue, counted.dead),
        "gates": await storage.gates(),
    }
