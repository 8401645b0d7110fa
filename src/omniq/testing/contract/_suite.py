"""Fixtures and helpers that all parts of the contract suite share."""

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

# Before any part is imported: only then does pytest show the values in a failed assertion.
pytest.register_assert_rewrite(
    *(f"{__package__}.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py"))
)

LEASE = Settings().lease
"""Seconds that an owner's lease lasts in a storage that was opened without settings."""

_Test = TypeVar("_Test", bound=Callable[..., Any])


class OpenAnother(Protocol):
    """Opens another owner on the store under test, which is closed when the test ends."""

    async def __call__(
        self,
        *,
        settings: Settings | None = None,
        max_pending: int | None = None,
        serializer: Serializer | None = None,
    ) -> BaseStorage: ...


@asynccontextmanager
async def opener(make: Callable[..., BaseStorage]) -> AsyncIterator[OpenAnother]:
    """Yield an `open_another` that calls `make`, and close every storage that it opened.

    `make` receives those of `settings`, `max_pending` and `serializer` that a test gives.
    """
    async with AsyncExitStack() as stack:

        async def open_another(
            *,
            settings: Settings | None = None,
            max_pending: int | None = None,
            serializer: Serializer | None = None,
        ) -> BaseStorage:
            options = {"settings": settings, "max_pending": max_pending, "serializer": serializer}
            given_options = {name: value for name, value in options.items() if value is not None}
            return await stack.enter_async_context(make(**given_options))

        yield open_another


def promise(*numbers: str) -> Callable[[_Test], _Test]:
    """Mark a test with the numbers of the promises that it checks."""

    def mark(test: _Test) -> _Test:
        test.__dict__["promises"] = numbers
        return test

    return mark


class ContractPart:
    """A part of the contract. A subclass may add tests; replacing one raises `TypeError`."""

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
    """Return the ids of the tasks, in their order."""
    return [task.id for task in tasks]


async def claim_one(storage: BaseStorage) -> Task:
    """Claim the next task. Fails if no task is due."""
    (task,) = await storage.reserve(1)
    return task


async def claim_and_expire(
    open_another: OpenAnother, clock: ManualClock, limit: int = 1
) -> list[Task]:
    """Claim tasks as a new owner and advance the clock until its lease has expired."""
    owner = await open_another()
    claimed = await owner.reserve(limit)
    clock.advance(LEASE)
    return claimed


async def status_of(storage: BaseStorage, task_id: str) -> TaskStatus | None:
    """Return the status of the task, or None if it has no record."""
    task = await storage.get_task(task_id)
    return None if task is None else task.status


async def visible_state(storage: BaseStorage) -> dict[str, object]:
    """Return what a reader can see of tasks, for comparison before and after a call.

    Values that depend on the current time are left out.
    """
    tasks = await storage.list_tasks(limit=1000)
    dead_letters = await storage.list_dead(limit=1000)
    counted = await storage.stats()
    return {
        "tasks": tasks,
        "results": [await storage.get_result(task.id) for task in tasks],
        "histories": [await storage.history(task.id) for task in tasks],
        "checkpoints": [await storage.load_checkpoint(task.id) for task in tasks],
        "dead": dead_letters,
        "counts": (counted.by_status, counted.by_queue, counted.dead),
        "gates": await storage.gates(),
    }
