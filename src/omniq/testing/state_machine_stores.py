"""One store under the state machine: its storage objects, their results, and what reads return.

Owner ids differ between stores. Results are returned with the model's owner names in their place, so
that results of different stores can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from omniq.errors import OmniqError
from omniq.models import Attempt, DeadLetter, Task, TaskError, TaskResult, WorkerInfo
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.types import GivenBack, PendingHook
from omniq.tasks.task_output import encode_chunk
from omniq.testing.clock import ManualClock
from omniq.testing.model import Owner


class Store(Protocol):
    """A store on which storage objects can be opened."""

    def another(self) -> BaseStorage:
        """An unopened storage object on the store, which becomes a separate owner."""
        ...

    async def reopen(self) -> None:
        """Restart the store. All earlier storage objects are closed or have crashed."""
        ...

    async def discard(self) -> None:
        """Delete the store."""
        ...


class MemoryStore:
    """The reference: storage objects on one `MemoryStorage`."""

    def __init__(self, clock: ManualClock, settings: Settings, max_pending: int | None) -> None:
        self._first = MemoryStorage(clock=clock, settings=settings, max_pending=max_pending)

    def another(self) -> BaseStorage:
        return self._first.another()

    async def reopen(self) -> None:
        """Do nothing: memory does not survive a restart, so here only the owners are replaced."""

    async def discard(self) -> None:
        """Do nothing: Python frees the memory."""


OpenStore = Callable[[ManualClock, Settings, int | None], Store]
"""Creates an empty store; the number is the `max_pending` of its storage objects."""


class Raised(msgspec.Struct, frozen=True):
    """The result of a call that raised an error."""

    kind: str
    task_id: str | None = None


def answer_of(call: Callable[[], Any]) -> Any:
    """The return value of the call, or the error that it raises."""
    try:
        return call()
    except OmniqError as error:
        return _raised(error)


def _raised(error: OmniqError) -> Raised:
    return Raised(type(error).__name__, getattr(error, "task_id", None))


class StoreUnderTest:
    """A store and its storage objects, one for each owner slot."""

    def __init__(self, label: str, store: Store) -> None:
        self.label = label
        self.store = store
        self.storages: list[BaseStorage] = []
        self._names: dict[str, str] = {}

    async def open_owner(self, slot: int, owner: Owner) -> None:
        """Open a new storage object in that slot."""
        storage = self.store.another()
        await storage.open()
        self.storages[slot:] = [storage, *self.storages[slot + 1 :]]
        self.map_owner(slot, owner)

    async def crash(self, slot: int) -> None:
        """Close an object's handles, as the operating system does for a process that died."""
        storage = self.storages[slot]
        # It cannot release its claims.
        storage._is_open = False
        await storage._backend.close()

    def map_owner(self, slot: int, owner: Owner) -> None:
        """Map this object's current owner id to the model's name for it."""
        name = self._names.setdefault(self.storages[slot].owner, owner.name)
        assert name == owner.name, f"{self.label}: {name} should have become {owner.name}"

    async def answer(self, slot: int, call: Callable[[BaseStorage], Awaitable[Any]]) -> Any:
        """The result of a call on the object in that slot, with the model's owner names."""
        try:
            return self._named(await call(self.storages[slot]))
        except OmniqError as error:
            return _raised(error)

    async def view(
        self, slot: int, names: Sequence[str], ids: Sequence[str], store_views: Sequence[str]
    ) -> dict[str, Any]:
        """All tasks, these views of the store, and all views of these ids, read by one object."""
        storage = self.storages[slot]
        owners = {name: owner for owner, name in self._names.items()}
        held = names if "held_by" in store_views else ()
        plain = [view for view in store_views if view != "held_by"]
        # Concurrently: nothing changes meanwhile, and a run has thousands of reads.
        answers = await asyncio.gather(
            storage.list_tasks(limit=1000),
            *(_STORE_VIEWS[view](storage) for view in plain),
            *(storage.held_by(owners[name]) for name in held),
            *(read for task_id in ids for read in _task_reads(storage, task_id)),
        )
        replies = iter(answers)
        listed = next(replies)
        assert len({task.id for task in listed}) == len(listed), "a task is listed twice"
        seen: dict[str, Any] = {"list_tasks": self._named({task.id: task for task in listed})}
        for view in plain:
            seen[view] = self._named(next(replies))
        if held:
            seen["held_by"] = {name: next(replies) for name in held}
        if "workers" in seen:
            seen["workers"] = {info.id: info.running for info in seen["workers"]}
        for task_id in ids:
            seen[task_id] = self._named({view: next(replies) for view in _TASK_VIEWS})
        return seen

    def _named(self, value: Any) -> Any:
        match value:
            case list() | tuple():
                return [self._named(item) for item in value]
            case dict():
                return {key: self._named(item) for key, item in value.items()}
            case Task() | Attempt():
                named = msgspec.structs.replace(value, owner=self._name(value.owner))
                return self._with_named_error(named) if isinstance(named, Attempt) else named
            case TaskResult():
                return self._with_named_error(value)
            case DeadLetter():
                details = self._with_names(value.error_details)
                return msgspec.structs.replace(value, error_details=details)
            case GivenBack():
                return msgspec.structs.replace(value, owner=self._name(value.owner))
            case PendingHook():
                return [self._name(value.owner), value.token, value.reason]
            case WorkerInfo():
                return msgspec.structs.replace(
                    value, id=self._name(value.id), running=list(value.running)
                )
            case _:
                return value

    def _name(self, owner: str | None) -> str | None:
        return self._names.get(owner, owner) if owner is not None else None

    def _with_named_error(self, value: Any) -> Any:
        if value.error is None:
            return value
        facts = value.error.to_record()
        facts["message"] = self._with_names(facts["message"])
        return msgspec.structs.replace(value, error=TaskError(**facts))

    def _with_names(self, text: str) -> str:
        for owner, name in self._names.items():
            text = text.replace(owner, name)
        return text


_STORE_VIEWS: dict[str, Callable[[BaseStorage], Awaitable[Any]]] = {
    "stats": lambda storage: storage.stats(),
    "workers": lambda storage: storage.workers(),
    "paused": lambda storage: storage.paused_queues(),
}
STORE_VIEWS = (*_STORE_VIEWS, "held_by")
"""The reads of a whole store, besides the list of its tasks."""

_TASK_VIEWS = ("task", "result", "history", "dead", "checkpoint", "progress", "output", "hook")


def _task_reads(storage: BaseStorage, task_id: str) -> Iterator[Awaitable[Any]]:
    yield storage.get_task(task_id)
    yield storage.get_result(task_id)
    yield storage.history(task_id)
    yield storage.get_dead(task_id)
    yield storage.load_checkpoint(task_id)
    yield storage.get_progress(task_id)
    yield _output(storage, task_id)
    yield storage.pending_hook(task_id)


async def _output(storage: BaseStorage, task_id: str) -> list[Any] | None:
    page = await storage.read_output(task_id, all_runs=True)
    found = None if page is None else [*page.chunks]
    while found is not None and page is not None and page.has_more:
        page = await storage.read_output(task_id, page.after, all_runs=True)
        found += () if page is None else page.chunks
    if found is None:
        return None
    return [[chunk.run, chunk.number, encode_chunk(chunk.value)] for chunk in found]


def differences(seen: Any, wanted: Any, where: str) -> Iterator[str]:
    """Each difference between the values, named by the innermost field that differs."""
    if seen == wanted:
        return
    if isinstance(seen, dict) and isinstance(wanted, dict) and seen.keys() == wanted.keys():
        for key in wanted:
            yield from differences(seen[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(seen, list) and isinstance(wanted, list) and len(seen) == len(wanted):
        for position, (left, right) in enumerate(zip(seen, wanted, strict=True)):
            yield from differences(left, right, f"{where}[{position}]")
    elif isinstance(seen, msgspec.Struct) and type(seen) is type(wanted):
        for name in seen.__struct_fields__:
            yield from differences(getattr(seen, name), getattr(wanted, name), f"{where}.{name}")
    else:
        yield f"{where} is {brief(seen)} and should be {brief(wanted)}"


def brief(value: Any) -> Any:
    """The value with each task shortened to its id and token, for messages."""
    match value:
        case Task():
            return f"{value.id}#{value.token}"
        case list() | tuple():
            return [brief(item) for item in value]
        case dict():
            return {key: brief(item) for key, item in value.items()}
        case _:
            return value
