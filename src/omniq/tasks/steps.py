"""What a task has done so far, kept across its runs: finished steps, positions, sleeps.

All of it is one checkpoint, saved as a whole under the task's claim, so that a run whose claim has
ended cannot save. A `Notebook` belongs to one run and lives on the event loop of its `Host`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from omniq.clock import Clock
from omniq.errors import InvalidTask, OmniqError, SerializationError, StaleClaim
from omniq.models import PermanentError, Progress, Task, TaskResult, TaskStatus
from omniq.serialization import Serializer, encode_internal, internal_decoder

if TYPE_CHECKING:
    from omniq.tasks.context import TaskContext

_T = TypeVar("_T")

_FORMAT = 1
_MOST_NAMES = 20


class Host(Protocol):
    """The worker, as a running task can reach it. Coroutines of it run on `loop`.

    Without a `loop`, `submit` runs a coroutine to its end before it returns.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def serializer(self) -> Serializer: ...

    def report(self, progress: Progress) -> None:
        """Keep the task's progress soon. From any thread."""

    def tell_skipped(self, task: Task, step: str, error: str) -> None:
        """Tell that a step failed which the task can do without. From any thread."""

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Have the coroutine run; from any thread, and from other event loops."""

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Make a call that blocks, beside the event loop that awaits this."""

    def transaction(
        self, task: Task, context: TaskContext, *, blocking: bool
    ) -> AbstractAsyncContextManager[Any]:
        """A connection whose commit ends the task as succeeded, and says so to its context.

        With `blocking`, the connection is for a thread beside the event loop.
        """

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        """What was last saved for the task. Waits for a storage that is away."""

    async def save_checkpoint(self, task_id: str, token: int, checkpoint: bytes) -> None:
        """Keep it in place of what was saved before. Waits for a storage that is away.

        Raises `StaleClaim` when the claim has ended.
        """


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How far an iteration is: items finished, the last of them if it is needed, whether it ended."""

    count: int = 0
    last: bytes | None = None
    has_ended: bool = False


class Kept(msgspec.Struct, omit_defaults=True):
    """A checkpoint. Steps are in the order in which they were finished; their results are encoded.

    Names that the task does not use any more stay, and are ignored.
    """

    format: int = _FORMAT
    steps: dict[str, bytes] = {}
    marks: dict[str, Mark] = {}
    sleeps: dict[str, int] = {}

    def done(self) -> list[str]:
        """What is finished, in words, the newest last."""
        steps = list(self.steps)
        if len(steps) > _MOST_NAMES:
            steps = [f"{len(steps) - _MOST_NAMES} steps", *steps[-_MOST_NAMES:]]
        marks = [f"{mark.count} of {name}" for name, mark in self.marks.items() if mark.count]
        return steps + marks[:_MOST_NAMES]


_decode = internal_decoder(Kept)


def read_checkpoint(checkpoint: bytes | None) -> Kept:
    """A checkpoint as it was saved, such as that of a dead letter. `SerializationError` on garbage."""
    kept = Kept() if checkpoint is None else _decode(checkpoint)
    if kept.format != _FORMAT:
        raise SerializationError(
            f"a checkpoint of format {kept.format}; this omniq reads {_FORMAT}"
        )
    return kept


def encode_value(serializer: Serializer, task_id: str, value: object) -> bytes:
    """A step's result, as results are kept."""
    return serializer.encode_result(
        TaskResult(task_id=task_id, status=TaskStatus.SUCCESS, result=value)
    )


def decode_value(serializer: Serializer, data: bytes) -> Any:
    """The result that `encode_value` was given."""
    return serializer.decode_result(data).result


def recoded(checkpoint: bytes, task_id: str, source: Serializer, target: Serializer) -> bytes:
    """The checkpoint with its values encoded by another serializer."""
    kept = read_checkpoint(checkpoint)

    def carried(data: bytes) -> bytes:
        return encode_value(target, task_id, decode_value(source, data))

    kept.steps = {name: carried(data) for name, data in kept.steps.items()}
    kept.marks = {
        name: msgspec.structs.replace(mark, last=carried(mark.last)) if mark.last else mark
        for name, mark in kept.marks.items()
    }
    return encode_internal(kept)


class Notebook:
    """The checkpoint of one claim. Used on the host's event loop alone.

    Loaded when first needed; the first claim of a task has nothing to load. Changes that come
    while a save is under way are saved together by the next.
    """

    def __init__(self, host: Host, task: Task) -> None:
        self._host = host
        self._task = task
        self._lock = asyncio.Lock()
        self._changes = 0
        self._saved = 0
        self._has_moved = False
        self._has_claim = True
        self._in_use: dict[str, bool] = {}
        self.kept: Kept | None = Kept() if task.token == 1 else None

    @property
    def under_way(self) -> list[str]:
        """The steps that have begun and not ended."""
        return [name for name, has_ended in self._in_use.items() if not has_ended]

    async def open(self) -> Kept:
        """What has been kept, loaded if it is not yet."""
        if self.kept is None:
            async with self._lock:
                if self.kept is None:
                    self.kept = await self._load()
        return self.kept

    async def begin(self, step: str) -> bytes | None:
        """Claim the step's name for this run; its kept result if it was finished before."""
        kept = await self.open()
        if step in self._in_use:
            raise InvalidTask(
                f"step {step!r} was begun twice in one run; give each step a name of its own"
            )
        found = kept.steps.get(step)
        self._in_use[step] = found is not None
        return found

    def fail(self, step: str) -> list[str]:
        """The step has failed, and may be begun again; what is done already."""
        self._in_use.pop(step, None)
        return [] if self.kept is None else self.kept.done()

    async def finish(self, step: str, result: bytes) -> None:
        """Keep the step's result."""
        kept = await self.open()
        kept.steps[step] = result
        self._in_use[step] = True
        try:
            await self._save()
        except SerializationError:
            # Too large with all the others; without it they can still be saved.
            del kept.steps[step]
            raise

    async def mark(self, name: str) -> Mark:
        """Where the iteration of that name stands."""
        kept = await self.open()
        if name in self._in_use:
            raise InvalidTask(
                f"cursor {name!r} was begun twice in one run; give each a name of its own"
            )
        self._in_use[name] = True
        return kept.marks.setdefault(name, Mark())

    def move(self, name: str, mark: Mark) -> None:
        """Note where the iteration stands, to be saved with what is saved next. From any thread."""
        assert self.kept is not None
        # Of a key that is there already: nobody who iterates over them meanwhile is disturbed.
        self.kept.marks[name] = mark
        self._has_moved = True

    async def sleep_until(self, name: str, instant: int) -> int:
        """When the sleep of that name ends: the instant that was kept first."""
        kept = await self.open()
        if name not in kept.sleeps:
            kept.sleeps[name] = instant
            await self._save()
        return kept.sleeps[name]

    async def flush(self) -> None:
        """Save what has not been saved yet."""
        if self._has_claim and (self._has_moved or self._saved < self._changes):
            await self._save()

    async def _save(self) -> None:
        self._changes += 1
        wanted = self._changes
        async with self._lock:
            if self._saved >= wanted:
                # The save before this one took it along.
                return
            taken, self._has_moved = self._changes, False
            checkpoint = encode_internal(self.kept)
            try:
                await self._host.save_checkpoint(self._task.id, self._task.token, checkpoint)
            except StaleClaim:
                self._has_claim = False
                raise
            self._saved = taken

    async def _load(self) -> Kept:
        checkpoint = await self._host.load_checkpoint(self._task.id)
        try:
            return read_checkpoint(checkpoint)
        except SerializationError as error:
            raise PermanentError(
                f"the checkpoint of the task cannot be read: {error}",
                error_type="SerializationError",
                recovery_hint="retry it from the start, which drops the checkpoint",
            ) from error


class Reach(Protocol):
    """The way from a task's code, wherever it runs, to the notebook on its host's event loop."""

    def __call__(
        self, use: Callable[[Notebook], Coroutine[Any, Any, _T]]
    ) -> Coroutine[Any, Any, _T]: ...


def here(work: Coroutine[Any, Any, _T]) -> Coroutine[Any, Any, _T] | _T:
    """The coroutine, to be awaited, where an event loop runs; elsewhere what it returns.

    Elsewhere it must be one that blocks the thread where it would wait.
    """
    return work if has_loop() else driven(work)


def driven(work: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as returned:
        return returned.value  # type: ignore[no-any-return]
    work.close()
    raise OmniqError("this part of a task was awaited outside of an event loop")


def has_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def reached(host: Host, work: Coroutine[Any, Any, _T]) -> _T:
    """What the coroutine returns, run on the host's event loop.

    Awaited on an event loop, or driven in a thread without one, which it blocks.
    """
    if not has_loop():
        return host.submit(work).result()
    if asyncio.get_running_loop() is host.loop:
        return await work
    return await asyncio.wrap_future(host.submit(work))
