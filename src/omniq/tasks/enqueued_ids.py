"""The ids of the tasks that a running task enqueues: the same calls get the same ids in every run of it.

So a task that runs again, after a failure or a crash, enqueues nothing twice: the storage has the ids
already. An id is a hash of the task that enqueues, of its occurrence if it repeats, and of

    the name that `ctx.options(name=…)` gives, and the place in its `enqueue_many`; without a name
    the function, the arguments, the step or the item of a cursor that makes the call, and how many
    equal calls the run has made there before.

With the step or the item, because the next run may begin after it: its first call of a kind is then not
the first of the task. The order of different calls is no part of it: threads and coroutines may enqueue at the same time, and
when a list is another one in the next run, no item is left out and none is enqueued twice.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from omniq.clock import encode_id, to_micros
from omniq.errors import DuplicateTask, InvalidTask, OmniqError, SerializationError
from omniq.models import Task
from omniq.serialization import Serializer
from omniq.signing import SealedSerializer
from omniq.tasks.steps import Place, encode_value
from omniq.tasks.task_enqueuer import NewTasks

if TYPE_CHECKING:
    from omniq.tasks.task_builder import TaskBuilder

_LARGEST_MILLIS = 2**48 - 1

_Key = tuple[bytes, int]
"""A digest of a name, or of a call without one; and a number."""


class EnqueuedIds:
    """The ids that one run has given. Used only on the event loop of the worker's services."""

    def __init__(self, parent: Task, builder: TaskBuilder, serializer: Serializer) -> None:
        created = to_micros(parent.created_at)
        # With its creation: a task that is enqueued again later under the same id is another one.
        self._scope = f"{parent.id} {created} {parent.occurrence}"
        self._millis = min(max(created // 1000, 0), _LARGEST_MILLIS)
        self._builder = builder
        self._serializer = serializer
        self._used: set[bytes] = set()
        self._counts: dict[bytes, int] = {}
        self._free: dict[bytes, list[int]] = {}
        self.nonce = self._hash("nonce").hex()
        """What the rows are stored under: the storage takes them for a repetition of the same rows."""

    def copy(self) -> EnqueuedIds:
        """What it is now, to return to when a transaction is rolled back."""
        copied = EnqueuedIds.__new__(EnqueuedIds)
        vars(copied).update(vars(self))
        copied._used, copied._counts = set(self._used), dict(self._counts)
        copied._free = {digest: list(numbers) for digest, numbers in self._free.items()}
        return copied

    def assign(self, new: NewTasks) -> tuple[list[Task], list[_Key]]:
        """Return the tasks with their ids, and what to `release` if they cannot be stored.

        Raises `InvalidTask` for a name that the run has used before, `DuplicateTask` for such an id.
        """
        if new.has_id:
            keys = [self._use(self._hash("id", task.id), _id_twice(task)) for task in new.tasks]
            return list(new.tasks), keys
        if new.name is not None:
            digest, _ = self._use(self._hash("name", new.name), _name_twice(new.name))
            keys = [(digest, place) for place in range(len(new.tasks))]
        else:
            keys = [self._next(self._digest(task, new.place)) for task in new.tasks]
        tasks = [
            msgspec.structs.replace(task, id=self._id(digest, number))
            for task, (digest, number) in zip(new.tasks, keys, strict=True)
        ]
        return tasks, keys

    def release(self, keys: Sequence[_Key]) -> None:
        """Let the run make these calls again, under the same ids: they were not stored."""
        for digest, number in keys:
            if digest in self._counts:
                heapq.heappush(self._free.setdefault(digest, []), number)
            self._used.discard(digest)

    def _use(self, digest: bytes, error: OmniqError) -> _Key:
        if digest in self._used:
            raise error
        self._used.add(digest)
        return digest, 0

    def _next(self, digest: bytes) -> _Key:
        if free := self._free.get(digest):
            return digest, heapq.heappop(free)
        self._counts[digest] = number = self._counts.get(digest, 0) + 1
        return digest, number

    def _digest(self, task: Task, place: Place | None) -> bytes:
        """What is the same in equal calls."""
        try:
            digest = self._builder.digest(task.func_path, task.args, task.kwargs)
        except SerializationError:
            digest = self._pickle_digest(task)
        serializer = self._serializer
        if isinstance(serializer, SealedSerializer) and serializer.seal.is_encrypting:
            # The id can be read: without the key, no one may try out which arguments it was made from.
            digest = serializer.seal.unique_names(digest)[0]
        where = () if place is None else (place[0], str(place[1]))
        return self._hash("call", task.func_path, task.queue, digest, *where)

    def _pickle_digest(self, task: Task) -> str:
        # If an object has another pickle in each run, its call is another one, and can be given a name.
        # A number in its place would leave out calls when their order changes.
        call = task.args, dict(sorted(task.kwargs.items()))
        try:
            return hashlib.sha256(encode_value(self._serializer, call)).hexdigest()
        except SerializationError:
            # It cannot be stored either, and the storage says why.
            return ""

    def _id(self, digest: bytes, number: int) -> str:
        tail = hashlib.sha256(digest + number.to_bytes(8, "big")).digest()[:10]
        return encode_id(self._millis, int.from_bytes(tail, "big"))

    def _hash(self, *parts: str) -> bytes:
        text = "".join(f"{len(part)}:{part}" for part in (self._scope, *parts))
        return hashlib.sha256(text.encode()).digest()[:16]


def _name_twice(name: str) -> InvalidTask:
    return InvalidTask(
        f"ctx.options(name={name!r}): this run has already enqueued a task with that name; give each "
        "call a different one"
    )


def _id_twice(task: Task) -> DuplicateTask:
    return DuplicateTask(task.id)
