"""Enqueueing from a child process: what its task asks for, and what the worker answers.

A child has no connection to the storage. Its task may ask about the tasks that it has enqueued in
this run, and about no others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Literal, NoReturn, TypeVar, assert_never, cast

import msgspec

from omniq.clock import Clock
from omniq.concurrency.coroutines import run_without_loop
from omniq.concurrency.event_loop import has_event_loop
from omniq.concurrency.portal import Portal
from omniq.errors import (
    DuplicateTask,
    InvalidTask,
    OmniqError,
    QueueFull,
    SerializationError,
    StaleClaim,
    StorageError,
    TaskNotFound,
    TaskNotWaiting,
)
from omniq.models import Progress, Task, TaskResult
from omniq.operations.handle import AsyncTaskHandle, TaskHandle
from omniq.serialization import Serializer, internal_decoder
from omniq.storage.base import BaseStorage
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.context import TaskContext
from omniq.tasks.steps import Place
from omniq.tasks.task_enqueuer import NewTasks
from omniq.worker.executors.process_flows import FlowAnswer, FlowRequest, answer_flow

_T = TypeVar("_T")

_LONGEST_WAIT = 0.5
"""Seconds that the worker waits for a result before it answers: it answers one question at a time."""

Question = Literal["task", "result", "cancel", "change", "run_now", "progress"]


class EnqueueRequest(msgspec.Struct, frozen=True):
    """A child asks to store tasks; they are encoded by the codec of its `ChildConfig`."""

    tasks: list[bytes]
    name: str | None
    has_id: bool
    place: Place | None


class TaskQuestion(msgspec.Struct, frozen=True):
    """A child asks about a task that it has enqueued, or asks to cancel or change it."""

    question: Question
    task_id: str
    seconds: float = 0.0
    priority: int | None = None
    queue: str | None = None
    eta: datetime | None = None


class Refusal(msgspec.Struct, frozen=True):
    """An error of the worker's, to be raised in the child."""

    kind: str
    message: str
    number: int = 0
    status: str = ""

    @classmethod
    def of(cls, error: OmniqError) -> Refusal:
        match error:
            case DuplicateTask() | TaskNotFound():
                return cls(type(error).__name__, error.task_id)
            case TaskNotWaiting():
                return cls("TaskNotWaiting", error.task_id, status=error.status)
            case StaleClaim():
                return cls("StaleClaim", error.task_id, error.token or 0)
            case QueueFull():
                return cls("QueueFull", "", error.max_pending)
            case SerializationError():
                return cls("SerializationError", str(error))
            case InvalidTask():
                return cls("InvalidTask", str(error))
            case _:
                return cls("StorageError", str(error))

    def to_error(self) -> OmniqError:
        match self.kind:
            case "DuplicateTask":
                return DuplicateTask(self.message)
            case "TaskNotFound":
                return TaskNotFound(self.message)
            case "TaskNotWaiting":
                return TaskNotWaiting(self.message, self.status)
            case "StaleClaim":
                return StaleClaim(self.message, self.number)
            case "QueueFull":
                return QueueFull(self.number)
            case "SerializationError":
                return SerializationError(self.message)
            case "InvalidTask":
                return InvalidTask(self.message)
            case _:
                return StorageError(self.message)


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to an `EnqueueRequest`, a `TaskQuestion` or a `FlowRequest`."""

    ids: list[str] = []
    task: bytes | None = None
    result: bytes | None = None
    progress: Progress | None = None
    is_cancelled: bool = False
    flow: FlowAnswer | None = None
    refusal: Refusal | None = None


decode_answer = internal_decoder(Answer)


# In the worker


class RunAnswers:
    """Answers what one run in a child process asks for."""

    def __init__(self, context: TaskContext, codec: Serializer) -> None:
        self._context = context
        self._codec = codec
        self._enqueued: set[str] = set()

    async def answer(self, request: EnqueueRequest | TaskQuestion | FlowRequest) -> Answer:
        """Return the answer; what the storage refuses is part of it."""
        try:
            if isinstance(request, FlowRequest):
                return Answer(flow=await answer_flow(self._context, self._codec, request))
            if isinstance(request, EnqueueRequest):
                return await self._enqueue(request)
            return await self._answer(request)
        except OmniqError as error:
            return Answer(refusal=Refusal.of(error))

    async def _enqueue(self, request: EnqueueRequest) -> Answer:
        tasks = [self._codec.decode_task(task) for task in request.tasks]
        new = NewTasks(tasks=tasks, name=request.name, has_id=request.has_id, place=request.place)
        ids = await self._context.enqueue_new(new)
        self._enqueued.update(ids)
        return Answer(ids=ids)

    async def _answer(self, request: TaskQuestion) -> Answer:
        task_id, storage = request.task_id, self._context._services.storage
        if task_id not in self._enqueued:
            raise TaskNotFound(task_id)
        match request.question:
            case "task":
                task = await storage.get_task(task_id)
                return Answer(task=None if task is None else self._codec.encode_task(task))
            case "result":
                seconds = min(request.seconds, _LONGEST_WAIT)
                result = await storage.wait_for_result(task_id, seconds)
                return Answer(result=None if result is None else self._codec.encode_result(result))
            case "cancel":
                return Answer(is_cancelled=await storage.cancel(task_id))
            case "change":
                changed = await storage.change_task(
                    task_id, priority=request.priority, queue=request.queue, eta=request.eta
                )
                return Answer(task=self._codec.encode_task(changed))
            case "run_now":
                changed = await storage.run_task_now(task_id)
                return Answer(task=self._codec.encode_task(changed))
            case "progress":
                return Answer(progress=await storage.get_progress(task_id))
            case _:
                assert_never(request.question)


# In the child

Ask = Callable[[EnqueueRequest | TaskQuestion], Answer]


class ChildTasks:
    """What handles read in a child process: the part of a storage that they use. It blocks."""

    def __init__(self, ask: Ask, codec: Serializer, clock: Clock) -> None:
        self._ask = ask
        self._codec = codec
        self.clock = clock

    async def get_task(self, task_id: str) -> Task | None:
        task = self._ask(TaskQuestion("task", task_id)).task
        return None if task is None else self._codec.decode_task(task)

    async def cancel(self, task_id: str) -> bool:
        return self._ask(TaskQuestion("cancel", task_id)).is_cancelled

    async def change_task(
        self, task_id: str, *, priority: int | None, queue: str | None, eta: datetime | None
    ) -> Task:
        asked = TaskQuestion("change", task_id, priority=priority, queue=queue, eta=eta)
        return self._codec.decode_task(self._ask(asked).task or b"")

    async def run_task_now(self, task_id: str) -> Task:
        return self._codec.decode_task(self._ask(TaskQuestion("run_now", task_id)).task or b"")

    async def get_progress(self, task_id: str) -> Progress | None:
        return self._ask(TaskQuestion("progress", task_id)).progress

    async def wait_for_output(self, task_id: str, *_: Any, **__: Any) -> NoReturn:
        raise InvalidTask(
            f"task {task_id}: a task in a child process cannot follow the output of another; follow it in an async "
            "task, or in a thread"
        )

    async def wait_for_result(self, task_id: str, timeout: float | None) -> TaskResult | None:
        is_over = threading.Event()

        def wait() -> TaskResult | None:
            end = None if timeout is None else self.clock.monotonic() + timeout
            while not is_over.is_set():
                left = _LONGEST_WAIT if end is None else end - self.clock.monotonic()
                answer = self._ask(TaskQuestion("result", task_id, max(0.0, left)))
                if answer.result is not None:
                    return self._codec.decode_result(answer.result)
                if left <= 0 or self._ask(TaskQuestion("task", task_id)).task is None:
                    return None
            return None

        if not has_event_loop():
            return wait()
        try:
            return await asyncio.to_thread(wait)
        finally:
            # A caller that was cancelled waits no longer: the end of the event loop waits for the thread.
            is_over.set()


class _ChildPortal(Portal):
    """Runs coroutines that never suspend, in the thread that calls."""

    def run(self, coroutine: Coroutine[Any, Any, _T], wait: float | None = 0.0) -> _T:
        return run_without_loop(coroutine)


_PORTAL = _ChildPortal()


class _ChildHandle(AsyncTaskHandle[Any]):
    async def _first_reason(self) -> str:
        return ""


def child_handle(
    tasks: ChildTasks, task_id: str, types: FunctionTypes | None, *, blocking: bool
) -> AsyncTaskHandle[Any] | TaskHandle[Any]:
    """Return a handle for a task in a child process."""
    handle = _ChildHandle(cast(BaseStorage, tasks), task_id, types)
    return TaskHandle(_PORTAL, handle) if blocking else handle
