"""Enqueueing from inside a running task: `ctx.enqueue`, `ctx.enqueue_many`, `ctx.options(…)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

import msgspec

from omniq.concurrency.event_loop import has_event_loop
from omniq.errors import InvalidTask
from omniq.models import Task, check_key
from omniq.tasks.steps import PLACE, Place, await_or_block, run_on_loop_of

if TYPE_CHECKING:
    from omniq.operations.handle import AsyncTaskHandle, TaskHandle
    from omniq.queue.async_queue import EnqueueOptions
    from omniq.tasks.context import TaskContext
    from omniq.tasks.task_builder import CallOptions

    _T = TypeVar("_T")

    class EnqueuedTask(TaskHandle[_T], Coroutine[Any, Any, AsyncTaskHandle[_T]]):
        """What `ctx.enqueue` returns: in async code to be awaited, elsewhere the handle itself."""

    class EnqueuedTasks(list[TaskHandle[_T]], Coroutine[Any, Any, list[AsyncTaskHandle[_T]]]):
        """What `ctx.enqueue_many` returns: in async code to be awaited, elsewhere the handles."""

    class ContextOptions(EnqueueOptions, total=False):
        """The options of `ctx.options(…)`: those of `queue.options(…)`, and a `name`."""

        name: str | None


P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Ts = TypeVarTuple("Ts")

_Function = Callable[..., Any] | str
_Call = tuple[_Function, tuple[Any, ...], dict[str, Any]]


class NewTasks(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one `ctx.enqueue` or `ctx.enqueue_many`, as tasks.

    `has_id`: the caller chose the id, with `task_id`. Otherwise the tasks get other ids. `place` is the
    step, or the item of a cursor, that makes the calls.
    """

    tasks: Sequence[Task]
    name: str | None = None
    has_id: bool = False
    place: Place | None = None


class TaskEnqueuer(ABC):
    """Enqueues tasks from inside a running task. A `TaskContext` is one, and `ctx.options(…)` returns one.

    Async tasks await its methods, which return `AsyncTaskHandle`s. In others they block, and return
    `TaskHandle`s. The tasks are stored where the running task is stored, and are independent of it: they
    run and fail, and are cancelled, as if another program had enqueued them.

    When the task runs again, the calls that it made before are not enqueued again: they return
    handles of the tasks that are there, as long as these have a record. Within
    `ctx.transaction()` the tasks exist once it is committed.
    """

    __slots__ = ()

    @overload
    def enqueue(
        self,
        func: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> EnqueuedTask[R]: ...

    @overload
    def enqueue(
        self, func: Callable[Concatenate[TaskContext, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> EnqueuedTask[R]: ...

    @overload
    def enqueue(
        self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> EnqueuedTask[R]: ...

    @overload
    def enqueue(
        self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> EnqueuedTask[R]: ...

    @overload
    def enqueue(self, func: str, /, *args: Any, **kwargs: Any) -> EnqueuedTask[Any]: ...

    def enqueue(self, func: _Function, /, *args: Any, **kwargs: Any) -> Any:
        """Store a call of the function, once for all runs of this task. Returns its handle.

        Raises `InvalidTask` for a call that cannot be stored, and `StaleClaim` when this run has to
        stop.
        """
        return await_or_block(self._enqueue_one((func, args, kwargs)))

    @overload
    def enqueue_many(
        self,
        calls: Callable[[TaskContext, Unpack[Ts]], Coroutine[Any, Any, R]],
        args: Iterable[tuple[*Ts]],
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[TaskContext, A], Coroutine[Any, Any, R]], args: Iterable[A]
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[Unpack[Ts]], Coroutine[Any, Any, R]], args: Iterable[tuple[*Ts]]
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[A], Coroutine[Any, Any, R]], args: Iterable[A]
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[TaskContext, Unpack[Ts]], R], args: Iterable[tuple[*Ts]]
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[TaskContext, A], R], args: Iterable[A]
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(
        self, calls: Callable[[Unpack[Ts]], R], args: Iterable[tuple[*Ts]]
    ) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(self, calls: Callable[[A], R], args: Iterable[A]) -> EnqueuedTasks[R]: ...

    @overload
    def enqueue_many(self, calls: str, args: Iterable[Any]) -> EnqueuedTasks[Any]: ...

    @overload
    def enqueue_many(self, calls: Iterable[Sequence[Any]]) -> EnqueuedTasks[Any]: ...

    def enqueue_many(
        self, calls: Iterable[Sequence[Any]] | _Function, args: Iterable[Any] | None = None
    ) -> Any:
        """Store many calls, all or none, once for all runs of this task. Returns their handles.

        `enqueue_many(func, args)` with the arguments of each call: a tuple, or a single argument that
        is not a tuple. Or `enqueue_many([(func, args, kwargs), …])`.
        """
        return await_or_block(self._enqueue_all(calls_of(calls, args)))

    async def _enqueue_one(self, call: _Call) -> Any:
        (handle,) = await self._enqueue_all([call])
        return handle

    @abstractmethod
    async def _enqueue_all(self, calls: list[_Call]) -> list[Any]:
        """Enqueue the calls, and return their handles."""


class OptionsEnqueuer(TaskEnqueuer):
    """What `ctx.options(…)` returns."""

    __slots__ = ("_call", "_context", "_name")

    def __init__(self, context: TaskContext, call: CallOptions, name: str | None) -> None:
        self._context = context
        self._call = call
        self._name = name

    async def _enqueue_all(self, calls: list[_Call]) -> list[Any]:
        return await enqueue_calls(self._context, calls, self._call, self._name)


def enqueuer_with(context: TaskContext, options: dict[str, Any]) -> OptionsEnqueuer:
    """Return an enqueuer with these options, which are checked."""
    name = options.pop("name", None)
    if name is not None:
        check_key("name", name)
        if options.get("task_id") is not None:
            raise InvalidTask("give either name or task_id, not both: each decides the task's id")
    if "connection" in options:
        raise InvalidTask(
            "connection is an option of queue.options(…): inside ctx.transaction(), ctx.enqueue is "
            "part of the transaction"
        )
    return OptionsEnqueuer(context, context._services.builder.call_options(options), name)


async def enqueue_calls(
    context: TaskContext, calls: list[_Call], call: CallOptions | None, name: str | None
) -> list[Any]:
    """Store the calls, and return a handle for each: a blocking one where no event loop runs."""
    services = context._services
    # Here, and not on the services' event loop: the types of arguments, and the functions that make
    # unique keys, are the user's code.
    builder, now = services.builder, services.clock.now()
    tasks = [
        builder.build(*each, now=now) if call is None else builder.build(*each, call, now)
        for each in calls
    ]
    has_id = call is not None and call.task_id is not None
    new = NewTasks(tasks=tasks, name=name, has_id=has_id, place=PLACE.get())
    ids = await run_on_loop_of(services, context.enqueue_new(new))
    return [
        services.handle(task_id, builder.types_of(func), blocking=not has_event_loop())
        for task_id, (func, _, _) in zip(ids, calls, strict=True)
    ]


def calls_of(calls: Iterable[Any] | _Function, args: Iterable[Any] | None) -> list[_Call]:
    """Turn both forms of `enqueue_many` into one list of calls."""
    if isinstance(calls, str) or callable(calls):
        if args is None:
            raise InvalidTask(
                "enqueue_many(func, args): give the arguments, one item for each call"
            )
        if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
            raise InvalidTask(
                "enqueue_many(func, args): expected a list with the arguments of each call, not "
                f"{type(args).__name__}; for one call, write enqueue(func, …)"
            )
        return [(calls, item if isinstance(item, tuple) else (item,), {}) for item in args]
    if args is not None:
        raise InvalidTask("enqueue_many: give a function and its arguments, or a list of calls")
    if isinstance(calls, Mapping) or not isinstance(calls, Iterable):
        raise InvalidTask(f"enqueue_many: expected a list of calls, not {type(calls).__name__}")
    return [_as_call(call) for call in calls]


def _as_call(call: Any) -> _Call:
    match call:
        case (func,):
            return func, (), {}
        case (func, tuple() | list() as args):
            return func, tuple(args), {}
        case (func, tuple() | list() as args, dict() as kwargs):
            return func, tuple(args), kwargs
        case _:
            raise InvalidTask(
                "enqueue_many: expected (func, args, kwargs) for each call, args a tuple and "
                "kwargs a dictionary"
            )
