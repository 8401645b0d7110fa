"""The checkpoint of a task: finished steps, cursor positions and sleeps, stored across its runs.

A checkpoint is saved as a whole under the task's claim, so that a run whose claim has ended cannot
save. A `RunCheckpoint` belongs to one run and is used on the event loop of its `WorkerServices`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from omniq.clock import Clock
from omniq.concurrency.coroutines import run_without_loop
from omniq.concurrency.event_loop import has_event_loop
from omniq.errors import InvalidTask, NotSealed, SerializationError, StaleClaim
from omniq.models import PermanentError, Progress, Task, TaskResult, TaskStatus
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.signing import (
    CHECKPOINT,
    has_seal,
    is_sealed,
    open_document,
    seal_document,
    unsealed,
)
from omniq.tasks.control import Snooze

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage
    from omniq.tasks.arguments import FunctionTypes
    from omniq.tasks.context import TaskContext
    from omniq.tasks.task_builder import TaskBuilder
    from omniq.tasks.task_enqueuer import NewTasks

_T = TypeVar("_T")

_FORMAT = 1
_MOST_NAMES = 20
_NO_ID = "step"
_UNTIL_SEALED = 60.0
"""Seconds after which a task whose checkpoint waits to be sealed looks at it again."""

Place = tuple[str, int]
"""The name of a step and -1, or that of a cursor and the number of its item."""

PLACE: ContextVar[Place | None] = ContextVar("omniq_place", default=None)
"""The step or the item of a cursor that runs here. A later run may leave out what is finished."""


class FlowAccess(Protocol):
    """What a running task does with the records of its workflow. Waits while the storage is unreachable."""

    async def add_children(self, task: Task, children: Sequence[Task], nonce: str) -> None:
        """Store tasks below the running one, once; `StaleClaim` when its claim has ended."""

    async def add_event(self, event: Task) -> None:
        """Store the record of an event that belongs to no task, unless there is one."""

    async def missing_of(self, ids: Sequence[str]) -> list[str]:
        """Return those that have no record."""

    async def close_group(self, group_id: str) -> None:
        """Say that a group gets no more members."""

    async def results_of(self, ids: Sequence[str]) -> dict[str, TaskResult]:
        """Return the final results of those that have ended."""

    async def values_of(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the values of those that have succeeded; that of a group is a list."""

    async def values_page(self, group_id: str, after: str) -> tuple[list[Any], str]:
        """Return results of members of a group after that id, and the id to go on after: '' at the end."""

    async def flow_value(self, flow_id: str) -> Any:
        """Return the result of a flow that has succeeded."""

    async def failures_of(self, group_id: str, limit: int) -> list[TaskResult]:
        """Return the results of members of a group that did not succeed, failures first."""

    async def event_deadline(self, event_id: str) -> datetime | None:
        """Return when an event expires."""

    async def expire_event(self, event_id: str) -> None:
        """End an event that was given no value in time."""


class WorkerServices(Protocol):
    """What the worker offers to a running task. Its coroutines run on `loop`.

    Without a `loop`, `submit` runs a coroutine to its end before it returns.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def serializer(self) -> Serializer: ...

    @property
    def state(self) -> Any:
        """What the worker's lifespan has yielded. Raises `OmniqError` if it has none."""

    @property
    def storage(self) -> BaseStorage:
        """The storage of the worker. Only for `loop`."""

    @property
    def builder(self) -> TaskBuilder:
        """Builds the tasks that a running task enqueues. May be used from any thread."""

    async def enqueue(self, task: Task, context: TaskContext, new: NewTasks) -> list[str]:
        """Store what the running task enqueues, in its open transaction if it has one."""

    def handle(self, task_id: str, types: FunctionTypes | None, *, blocking: bool) -> Any:
        """Return a handle of a task that the running task has enqueued, for its thread or event loop."""

    def report(self, progress: Progress) -> None:
        """Store the task's progress soon. May be called from any thread."""

    def add_output(self, task: Task, data: bytes) -> bool:
        """Store a chunk of output soon; returns whether there is room for more. From any thread."""

    async def wait_for_room(self, task: Task) -> None:
        """Return when there is room for more output of the task, or after a moment."""

    def report_skipped_step(self, task: Task, step: str, error: str) -> None:
        """Emit the event that a step that is not critical failed. May be called from any thread."""

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run the coroutine on `loop`. May be called from any thread and any event loop."""

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Make a blocking call in a thread, while the event loop goes on."""

    def transaction(
        self, task: Task, context: TaskContext, *, blocking: bool
    ) -> AbstractAsyncContextManager[Any]:
        """Return a connection whose commit also records the success of the task.

        After the commit, `context.completed` holds the outcome. With `blocking`, the connection is
        for a thread that runs no event loop.
        """

    @property
    def flows(self) -> FlowAccess:
        """The records that a running task adds and waits for."""

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        """Return the task's newest checkpoint. Waits while the storage is unreachable."""

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        """Replace the task's checkpoint. Waits while the storage is unreachable.

        Raises `StaleClaim` when the claim has ended.
        """


class CursorPosition(msgspec.Struct, frozen=True, array_like=True):
    """How far a cursor is: the number of finished items, the last one if it is needed, the end."""

    count: int = 0
    last: bytes | None = None
    has_ended: bool = False


class CheckpointData(msgspec.Struct, omit_defaults=True):
    """A checkpoint as it is stored. Steps are in the order in which they finished, results encoded.

    Names that the task no longer uses stay and are ignored.
    """

    format: int = _FORMAT
    steps: dict[str, bytes] = {}
    marks: dict[str, CursorPosition] = {}
    sleeps: dict[str, int] = {}

    def done(self) -> list[str]:
        """Describe what is finished, the newest last."""
        steps = list(self.steps)
        if len(steps) > _MOST_NAMES:
            steps = [f"{len(steps) - _MOST_NAMES} steps", *steps[-_MOST_NAMES:]]
        marks = [f"{mark.count} of {name}" for name, mark in self.marks.items() if mark.count]
        return steps + marks[:_MOST_NAMES]


_decode = internal_decoder(CheckpointData)

TaskKey = tuple[str, str]
"""The id and the function of the task that a checkpoint belongs to."""


def task_key(task: Task) -> TaskKey:
    return task.id, task.func_path


def read_checkpoint(serializer: Serializer, task: TaskKey, stored: bytes | None) -> CheckpointData:
    """Decode a stored checkpoint, such as that of a dead letter.

    Raises `SerializationError` for bytes that are not a checkpoint, or not one of this task.
    """
    if stored is None:
        return CheckpointData()
    try:
        return _decoded(open_document(serializer, CHECKPOINT, stored, *task))
    except SerializationError:
        if older_checkpoint(serializer, task, stored) is None:
            raise
        raise NotSealed(f"the checkpoint of task {task[0]}") from None


def _decoded(document: bytes) -> CheckpointData:
    data = _decode(document)
    if data.format != _FORMAT:
        raise SerializationError(
            f"a checkpoint of format {data.format}; this omniq reads {_FORMAT}"
        )
    return data


def older_checkpoint(serializer: Serializer, task: TaskKey, stored: bytes) -> CheckpointData | None:
    """Decode a checkpoint in which an older omniq has sealed each value, and not the names.

    None for other bytes, and for one with values of other tasks.
    """
    if has_seal(stored) or not is_sealed(serializer):
        return None
    try:
        data = _decoded(stored)
        data.steps = {
            name: _from_older(serializer, value, {task[0]}) for name, value in data.steps.items()
        }
        # The place of a cursor was sealed under its name, or under the task's id in a child process.
        data.marks = {
            name: msgspec.structs.replace(
                mark, last=_from_older(serializer, mark.last, {task[0], name})
            )
            if mark.last
            else mark
            for name, mark in data.marks.items()
        }
    except SerializationError:
        return None
    return data


def _from_older(serializer: Serializer, value: bytes, owners: set[str]) -> bytes:
    result = serializer.decode_result(value)
    if result.task_id not in owners:
        raise SerializationError(f"the value of a step belongs to {result.task_id}")
    return encode_value(serializer, result.result)


def encode_checkpoint(serializer: Serializer, task: TaskKey, data: CheckpointData) -> bytes:
    """Encode a checkpoint of this task, to be stored."""
    return seal_document(serializer, CHECKPOINT, encode_internal(data), *task)


def encode_value(serializer: Serializer, value: object) -> bytes:
    """Encode the result of a step, as results of tasks are encoded. The checkpoint seals it."""
    result = TaskResult(task_id=_NO_ID, status=TaskStatus.SUCCESS, result=value)
    return unsealed(serializer).encode_result(result)


def decode_value(serializer: Serializer, data: bytes) -> Any:
    """Decode what `encode_value` encoded, from a checkpoint that was read by `read_checkpoint`."""
    return unsealed(serializer).decode_result(data).result


def reencode_checkpoint(
    checkpoint: bytes, task: TaskKey, source: Serializer, target: Serializer
) -> bytes:
    """Return the checkpoint encoded, and sealed, by another serializer."""
    data = read_checkpoint(source, task, checkpoint)

    def reencode(value: bytes) -> bytes:
        return encode_value(target, decode_value(source, value))

    data.steps = {name: reencode(value) for name, value in data.steps.items()}
    data.marks = {
        name: msgspec.structs.replace(mark, last=reencode(mark.last)) if mark.last else mark
        for name, mark in data.marks.items()
    }
    return encode_checkpoint(target, task, data)


class RunCheckpoint:
    """The checkpoint of one claim. Used only on the event loop of the worker's services.

    It is loaded when first needed; the first claim of a task has nothing to load. Changes that are
    made while a save is under way are saved together by the next save.
    """

    def __init__(self, services: WorkerServices, task: Task) -> None:
        self._services = services
        self._task = task
        self._lock = asyncio.Lock()
        self._changes = 0
        self._saved = 0
        self._has_moved = False
        self._has_claim = True
        self._in_use: dict[str, bool] = {}
        self.data: CheckpointData | None = CheckpointData() if task.token == 1 else None

    @property
    def running_steps(self) -> list[str]:
        """The steps that have begun and not ended."""
        return [name for name, has_ended in self._in_use.items() if not has_ended]

    async def load(self) -> CheckpointData:
        """Return the stored data; the first call loads it."""
        if self.data is None:
            async with self._lock:
                if self.data is None:
                    self.data = await self._read()
        return self.data

    async def begin(self, step: str) -> bytes | None:
        """Claim the step's name for this run; return its result if it finished in an earlier run."""
        data = await self.load()
        if step in self._in_use:
            raise InvalidTask(
                f"step {step!r} was begun twice in one run; give each step its own name"
            )
        result = data.steps.get(step)
        self._in_use[step] = result is not None
        return result

    def fail(self, step: str) -> list[str]:
        """Allow the failed step to begin again; return what is finished."""
        self._in_use.pop(step, None)
        return [] if self.data is None else self.data.done()

    async def finish(self, step: str, result: bytes) -> None:
        """Save the step's result."""
        data = await self.load()
        data.steps[step] = result
        self._in_use[step] = True
        try:
            await self._save()
        except SerializationError:
            # Too large together with the others; without it they can still be saved.
            del data.steps[step]
            raise

    async def open_cursor(self, name: str) -> CursorPosition:
        """Claim the cursor's name for this run; return its position."""
        data = await self.load()
        if name in self._in_use:
            raise InvalidTask(
                f"cursor {name!r} was begun twice in one run; give each cursor its own name"
            )
        self._in_use[name] = True
        return data.marks.setdefault(name, CursorPosition())

    def move_cursor(self, name: str, position: CursorPosition) -> None:
        """Set a cursor's position, to be saved with the next save. May be called from any thread."""
        assert self.data is not None
        # The key exists already, so another thread may iterate over the dictionary meanwhile.
        self.data.marks[name] = position
        self._has_moved = True

    async def sleep_until(self, name: str, instant: int) -> int:
        """Return when the sleep of that name ends: the instant that was stored first."""
        data = await self.load()
        if name not in data.sleeps:
            data.sleeps[name] = instant
            await self._save()
        return data.sleeps[name]

    async def flush(self) -> None:
        """Save the changes that are not saved yet."""
        if self._has_claim and (self._has_moved or self._saved < self._changes):
            await self._save()

    async def _save(self) -> None:
        self._changes += 1
        own_change = self._changes
        async with self._lock:
            if self._saved >= own_change:
                # The previous save included this change.
                return
            included, self._has_moved = self._changes, False
            checkpoint = self._encoded()
            try:
                await self._services.save_checkpoint(self._task.id, self._task.token, checkpoint)
            except StaleClaim:
                self._has_claim = False
                raise
            self._saved = included

    def _encoded(self) -> bytes:
        assert self.data is not None
        return encode_checkpoint(self._services.serializer, task_key(self._task), self.data)

    async def _read(self) -> CheckpointData:
        try:
            stored = await self._services.load_checkpoint(self._task.id)
            return read_checkpoint(self._services.serializer, task_key(self._task), stored)
        except NotSealed as error:
            # No run of it can do anything else, but an operator can; a failure would be for good.
            raise Snooze(_UNTIL_SEALED, reason=str(error)) from error
        except SerializationError as error:
            raise PermanentError(
                f"the checkpoint of the task cannot be read: {error}",
                error_type="SerializationError",
                recovery_hint="retry it from the start, which drops the checkpoint",
            ) from error


class CheckpointAccess(Protocol):
    """Runs a coroutine on the checkpoint, on the services' event loop, for code on any thread."""

    def __call__(
        self, use: Callable[[RunCheckpoint], Coroutine[Any, Any, _T]]
    ) -> Coroutine[Any, Any, _T]: ...


def await_or_block(work: Coroutine[Any, Any, _T]) -> Coroutine[Any, Any, _T] | _T:
    """Return the coroutine where an event loop runs; elsewhere run it and return its result.

    Elsewhere, the coroutine must block the thread instead of suspending.
    """
    return work if has_event_loop() else run_without_loop(work)


async def run_on_loop_of(services: WorkerServices, work: Coroutine[Any, Any, _T]) -> _T:
    """Run the coroutine on the event loop of the services, and return its result.

    In a thread without an event loop this coroutine blocks, and never suspends.
    """
    if not has_event_loop():
        return services.submit(work).result()
    if asyncio.get_running_loop() is services.loop:
        return await work
    return await asyncio.wrap_future(services.submit(work))
