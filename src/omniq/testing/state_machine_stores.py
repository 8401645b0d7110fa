"""One store under a game of many owners: its storage objects, its answers, and what it shows.

Owners have ids of their own on every store. Answers are told with the names that the model gave
them, so that those of different stores can be compared.
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
from omniq.storage.types import GivenBack
from omniq.testing.clock import ManualClock
from omniq.testing.model import Owner


class Store(Protocol):
    """A store that storage objects can be made for."""

    def another(self) -> BaseStorage:
        """An unopened storage object on the store, an owner of its own."""
        ...

    async def reopen(self) -> None:
        """Be the store after a restart: every object made before is gone."""
        ...

    async def discard(self) -> None:
        """Delete the store."""
        ...


class MemoryStore:
    """The reference: objects on one memory."""

    def __init__(self, clock: ManualClock, settings: Settings, max_pending: int | None) -> None:
        self._first = MemoryStorage(clock=clock, settings=settings, max_pending=max_pending)

    def another(self) -> BaseStorage:
        return self._first.another()

    async def reopen(self) -> None:
        """Memory does not survive a restart; for the game it is as if all owners were replaced."""

    async def discard(self) -> None:
        """Gone with the last reference."""


OpenStore = Callable[[ManualClock, Settings, int | None], Store]
"""Makes an empty store; the number is its objects' `max_pending`."""


class Raised(msgspec.Struct, frozen=True):
    """An answer that is an error."""

    kind: str
    task_id: str | None = None


def answer_of(call: Callable[[], Any]) -> Any:
    """What the call gives, or which error it raises."""
    try:
        return call()
    except OmniqError as error:
        return _raised(error)


def _raised(error: OmniqError) -> Raised:
    return Raised(type(error).__name__, getattr(error, "task_id", None))


class Side:
    """A store and its storage objects, one for each place at the table."""

    def __init__(self, label: str, store: Store) -> None:
        self.label = label
        self.store = store
        self.objects: list[BaseStorage] = []
        self._names: dict[str, str] = {}

    async def sit_down(self, place: int, owner: Owner) -> None:
        """Open a fresh object at that place."""
        storage = self.store.another()
        await storage.open()
        self.objects[place:] = [storage, *self.objects[place + 1 :]]
        self.learn_name(place, owner)

    async def crash(self, place: int) -> None:
        """Let go of an object as the system does for a process that died."""
        storage = self.objects[place]
        # Its handles are closed, but it has no chance to give back what it holds.
        storage._is_open = False
        await storage._close()

    def learn_name(self, place: int, owner: Owner) -> None:
        """Remember what the model calls this object's owner id of the moment."""
        name = self._names.setdefault(self.objects[place].owner, owner.name)
        assert name == owner.name, f"{self.label}: {name} should have become {owner.name}"

    async def answer(self, place: int, call: Callable[[BaseStorage], Awaitable[Any]]) -> Any:
        """What the object at that place answers, told with the model's names."""
        try:
            return self._named(await call(self.objects[place]))
        except OmniqError as error:
            return _raised(error)

    async def look(
        self, place: int, names: Sequence[str], ids: Sequence[str], topics: Sequence[str]
    ) -> dict[str, Any]:
        """Every task, and all that can be asked of the topics and ids, by the object at a place."""
        storage = self.objects[place]
        owners = {name: owner for owner, name in self._names.items()}
        held = names if "held_by" in topics else ()
        plain = [topic for topic in topics if topic != "held_by"]
        # Asked all at once: nothing changes meanwhile, and a game has thousands of questions.
        answers = await asyncio.gather(
            storage.list_tasks(limit=1000),
            *(_TOPICS[topic](storage) for topic in plain),
            *(storage.held_by(owners[name]) for name in held),
            *(question for task_id in ids for question in _questions(storage, task_id)),
        )
        replies = iter(answers)
        listed = next(replies)
        assert len({task.id for task in listed}) == len(listed), "a task is listed twice"
        seen: dict[str, Any] = {"list_tasks": self._named({task.id: task for task in listed})}
        for topic in plain:
            seen[topic] = self._named(next(replies))
        if held:
            seen["held_by"] = {name: next(replies) for name in held}
        if "workers" in seen:
            seen["workers"] = {info.id: info.running for info in seen["workers"]}
        for task_id in ids:
            seen[task_id] = self._named({asked: next(replies) for asked in _ASKED})
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


_TOPICS: dict[str, Callable[[BaseStorage], Awaitable[Any]]] = {
    "stats": lambda storage: storage.stats(),
    "workers": lambda storage: storage.workers(),
    "paused": lambda storage: storage.paused_queues(),
}
TOPICS = (*_TOPICS, "held_by")
"""What can be asked of a store besides its tasks."""

_ASKED = ("task", "result", "history", "dead", "checkpoint", "progress")


def _questions(storage: BaseStorage, task_id: str) -> Iterator[Awaitable[Any]]:
    yield storage.get_task(task_id)
    yield storage.get_result(task_id)
    yield storage.history(task_id)
    yield storage.get_dead(task_id)
    yield storage.load_checkpoint(task_id)
    yield storage.get_progress(task_id)


def differences(seen: Any, wanted: Any, where: str) -> Iterator[str]:
    """What is other than it should be, as deep inside as it can be named."""
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
    """The value with tasks as their ids and tokens, for reading."""
    match value:
        case Task():
            return f"{value.id}#{value.token}"
        case list() | tuple():
            return [brief(item) for item in value]
        case dict():
            return {key: brief(item) for key, item in value.items()}
        case _:
            return value
