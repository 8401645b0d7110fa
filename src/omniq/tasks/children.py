"""The children and waits of a running task: `ctx.call`, `map`, `spawn`, `wait`, `wait_for`.

A task that has to wait ends its run and is suspended: it holds no slot. When it is released, it runs again from its
beginning. Children and events that have ended return their stored values; they are identified by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    overload,
)

import msgspec

from omniq.clock import from_micros, seconds_to_micros, to_micros
from omniq.errors import InvalidTask, SerializationError, StaleClaim
from omniq.models import (
    ChildrenFailed,
    PermanentError,
    Task,
    TaskResult,
    TaskStatus,
    TaskWorkflow,
    WaitTimeout,
)
from omniq.tasks.control import Suspend
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.flow_records import (
    EVENT_NONCE,
    child_id,
    event_task,
    group_task,
    member_id,
)
from omniq.tasks.steps import RunCheckpoint, WorkerServices, await_or_block, run_on_loop_of

if TYPE_CHECKING:
    from omniq.tasks.arguments import FunctionTypes
    from omniq.tasks.context import TaskContext

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_AT_ONCE = 500
"""The most children that are stored in one step."""

_FAILURES = 10
_SIMPLE = {"bool": bool, "int": int, "float": float, "str": str}


class Child(Generic[R]):
    """A task that a running task has added below itself."""

    __slots__ = ("_types", "id")

    def __init__(self, task_id: str, types: FunctionTypes | None) -> None:
        self.id = task_id
        self._types = types

    def value(self, result: TaskResult) -> R:
        """The result of the child as its function declares it."""
        value = result.result
        return cast(R, value if self._types is None else self._types.load_result(value))

    def __repr__(self) -> str:
        return f"Child({self.id!r})"


class ChildTasks:
    """The part of a `TaskContext` that adds tasks below the running one, and waits."""

    __slots__ = ("_names", "unstored")

    _names: set[str] | None
    unstored: list[Task] | None
    """The children that were added and are not stored yet."""

    if TYPE_CHECKING:
        _task: Task
        _services: WorkerServices
        _is_stopped: bool

        @property
        def in_transaction(self) -> bool: ...

        async def _use_checkpoint(
            self, use: Callable[[RunCheckpoint], Coroutine[Any, Any, T]]
        ) -> T: ...

    @overload
    def call(
        self,
        name: str,
        func: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def call(
        self,
        name: str,
        func: Callable[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def call(
        self, name: str, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def call(self, name: str, func: str, /, *args: Any, **kwargs: Any) -> Any: ...

    def call(self, name: str, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the call as a task below this one, once for all runs of this task; returns its result.

        Raises `ChildrenFailed` if it does not succeed.
        """
        return self.wait(self.spawn(name, func, *args, **kwargs))

    @overload
    def spawn(
        self,
        name: str,
        func: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Child[R]: ...

    @overload
    def spawn(
        self,
        name: str,
        func: Callable[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Child[R]: ...

    @overload
    def spawn(
        self, name: str, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Child[R]: ...

    @overload
    def spawn(self, name: str, func: str, /, *args: Any, **kwargs: Any) -> Child[Any]: ...

    def spawn(self, name: str, func: Any, /, *args: Any, **kwargs: Any) -> Child[Any]:
        """Add a call as a task below this one, once for all runs of this task.

        It is stored at the next wait, or when the function returns. This task ends only after its children have
        ended.
        """
        self._check_may_wait()
        task_id = self._child_id(name)
        builder = self._services.builder
        task = builder.build(func, args, kwargs, now=self._services.clock.now(), in_flow=True)
        self._add(self._child(task, task_id, self._task.id))
        return Child(task_id, builder.types_of(func))

    @overload
    def map(
        self,
        name: str,
        func: Callable[Concatenate[TaskContext, T, P], Coroutine[Any, Any, R]],
        over: Iterable[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, list[R]]: ...

    @overload
    def map(
        self,
        name: str,
        func: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
        over: Iterable[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, list[R]]: ...

    @overload
    def map(
        self,
        name: str,
        func: Callable[Concatenate[T, P], R],
        over: Iterable[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, list[R]]: ...

    def map(self, name: str, func: Any, over: Iterable[Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a call for each item as tasks below this one, and return the list of their results.

        If one does not succeed, the others are cancelled, and `ChildrenFailed` is raised.
        """
        self._check_may_wait()
        return await_or_block(self._map(name, func, list(over), args, kwargs))

    @overload
    def wait(
        self, child: Child[R], /, *, timeout: Duration | None = None
    ) -> Coroutine[Any, Any, R]: ...

    @overload
    def wait(
        self,
        *waitables: Any,
        enough: int | None = None,
        timeout: Duration | None = None,
        on_failure: Literal["raise", "collect"] = "raise",
    ) -> Coroutine[Any, Any, Any]: ...

    def wait(
        self,
        *waitables: Any,
        enough: int | None = None,
        timeout: Duration | None = None,
        on_failure: Literal["raise", "collect"] = "raise",
    ) -> Any:
        """Wait for children, or for tasks and flows by their handles. The task holds no slot while it waits.

        Returns the result of one, or the list of results of several. With `enough`, it returns as soon as that many
        have ended: a list of the `TaskResult`s of those. `on_failure="collect"` also returns `TaskResult`s, instead of
        raising `ChildrenFailed`. Raises `WaitTimeout` after `timeout`.
        """
        self._check_may_wait()
        if not waitables:
            raise InvalidTask("ctx.wait: expected at least one child, handle or id to wait for")
        if enough is not None and not 1 <= enough <= len(waitables):
            raise InvalidTask(f"enough={enough}: expected a number from 1 to {len(waitables)}")
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        return await_or_block(self._wait(waitables, enough, seconds, on_failure == "collect"))

    @overload
    def wait_for(
        self, event: str, *, timeout: Duration | None = None, prompt: str = ""
    ) -> Coroutine[Any, Any, Any]: ...

    @overload
    def wait_for(
        self, event: str, type: type[T], *, timeout: Duration | None = None, prompt: str = ""
    ) -> Coroutine[Any, Any, T]: ...

    def wait_for(
        self, event: str, type: Any = None, *, timeout: Duration | None = None, prompt: str = ""
    ) -> Any:
        """Wait until `queue.send_event(event, value, to=…)` sends the event to this task; returns the value.

        The first value counts, even if it was sent before. An event whose name contains a dot belongs to no task:
        `queue.send_event(event, value)` sends it to all tasks that wait for it. Raises `WaitTimeout` after `timeout`.
        `prompt` is shown to the person who decides.
        """
        self._check_may_wait()
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        return await_or_block(self._wait_for(event, type, seconds, prompt))

    # Adding

    def _check_may_wait(self) -> None:
        if self.in_transaction:
            raise InvalidTask(
                "a task cannot add children or wait inside ctx.transaction(): its commit ends the task"
            )
        if self._task.interval is not None or self._task.cron is not None:
            raise InvalidTask(
                "a task that repeats cannot have children or wait: let it enqueue a task that does"
            )
        if self._is_stopped:
            raise StaleClaim(self._task.id, self._task.token)

    def _child_id(self, name: str) -> str:
        task_id = child_id(self._task.id, name, "child")
        if self._names is None:
            self._names = set()
        if name in self._names:
            raise InvalidTask(f"child {name!r} was added twice in one run; give each its own name")
        self._names.add(name)
        return task_id

    def _add(self, child: Task) -> None:
        if self.unstored is None:
            self.unstored = []
        self.unstored.append(child)

    def _child(self, task: Task, task_id: str, parent: str) -> Task:
        return msgspec.structs.replace(
            task,
            id=task_id,
            unique=None,
            workflow=msgspec.structs.replace(task.workflow or TaskWorkflow(), parent=parent),
            queue=task.queue if task.queue != "default" else self._task.queue,
        )

    async def store_children(self) -> None:
        """Store the children that were added and not stored yet."""
        while self.unstored:
            part = self.unstored[:_AT_ONCE]
            await self._on_loop(self._services.flows.add_children(self._task, part, self._nonce))
            del self.unstored[: len(part)]

    @property
    def _nonce(self) -> str:
        return f"child {to_micros(self._task.created_at)}"

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await run_on_loop_of(self._services, work)

    async def _map(
        self, name: str, func: Any, items: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        group_id = self._child_id(name)
        builder, now = self._services.builder, self._services.clock.now()
        await self.store_children()
        results = await self._on_loop(self._services.flows.results_of([group_id]))
        if group_id not in results:
            fields = {"queue": self._task.queue, "created_at": now, "stops": True}
            is_large = len(items) >= _AT_ONCE
            self._add(group_task(group_id, self._task.id, is_open=is_large, **fields))
            for number, item in enumerate(items):
                task = builder.build(func, (item, *args), kwargs, now=now, in_flow=True)
                self._add(self._child(task, member_id(group_id, number), group_id))
            await self.store_children()
            if is_large:
                await self._on_loop(self._services.flows.close_group(group_id))
            results = await self._wait_until_ended([group_id], None, None)
        if results[group_id].status is not TaskStatus.SUCCESS:
            failures = await self._on_loop(self._services.flows.failures_of(group_id, _FAILURES))
            raise _children_failed(failures or [results[group_id]])
        values = await self._on_loop(self._services.flows.values_of([group_id]))
        types = builder.types_of(func)
        return [value if types is None else types.load_result(value) for value in values[group_id]]

    # Waiting

    async def _wait_until_ended(
        self, ids: Sequence[str], enough: int | None, until: datetime | None
    ) -> dict[str, TaskResult]:
        """The results of the records that have ended, if they are enough; otherwise the run ends here."""
        results = await self._on_loop(self._services.flows.results_of(ids))
        if len(results) >= (len(ids) if enough is None else enough):
            return results
        if until is not None and self._services.clock.now() >= until:
            return results
        missing = await self._on_loop(self._services.flows.missing_of(ids))
        if missing:
            raise PermanentError(f"{missing[0]} has no record, so its end cannot be waited for")
        raise Suspend(ids, enough=enough, until=until)

    async def _wait(
        self, waitables: Sequence[Any], enough: int | None, seconds: float | None, collects: bool
    ) -> Any:
        await self.store_children()
        ids = [_id_of(each) for each in waitables]
        until = None if seconds is None else await self._deadline(f"wait {' '.join(ids)}", seconds)
        results = await self._wait_until_ended(ids, enough, until)
        if len(results) < (len(ids) if enough is None else enough):
            missing = [each for each in ids if each not in results]
            raise WaitTimeout(f"{', '.join(missing[:_FAILURES])} did not end within {seconds:g} s")
        ordered = [results[each] for each in ids if each in results]
        if enough is not None or collects:
            return ordered
        failed = [each for each in ordered if each.status is not TaskStatus.SUCCESS]
        if failed:
            raise _children_failed(failed[:_FAILURES])
        values = await self._values(waitables, results)
        return values[0] if len(values) == 1 else values

    async def _values(self, waitables: Sequence[Any], results: dict[str, TaskResult]) -> list[Any]:
        values: list[Any] = []
        for each in waitables:
            result = results[_id_of(each)]
            if isinstance(each, Child):
                values.append(each.value(result))
            elif hasattr(each, "nodes"):
                values.append(await self._on_loop(self._services.flows.flow_value(_id_of(each))))
            else:
                values.append(result.result)
        return values

    async def _deadline(self, name: str, seconds: float) -> datetime:
        """The deadline of a wait, which the first run has stored."""
        end = self._services.clock.micros() + seconds_to_micros(seconds)
        stored = await self._use_checkpoint(lambda checkpoint: checkpoint.sleep_until(name, end))
        return from_micros(stored)

    async def _wait_for(self, event: str, kind: Any, seconds: float | None, prompt: str) -> Any:
        is_own = "." not in event
        event_id = self._child_id(event) if is_own else event
        await self.store_children()
        services = self._services
        results = await self._on_loop(services.flows.results_of([event_id]))
        if event_id not in results:
            now = services.clock.now()
            expires = None if seconds is None else now + timedelta(seconds=seconds)
            if not is_own:
                return await self._wait_for_shared(event_id, kind, seconds)
            task = event_task(
                event_id,
                self._task,
                expires=expires,
                value=_simple_name(kind),
                prompt=str(prompt)[:1000],
                created_at=now,
            )
            await self._on_loop(services.flows.add_children(self._task, [task], EVENT_NONCE))
            until = await self._on_loop(services.flows.event_deadline(event_id))
            results = await self._wait_until_ended([event_id], None, until)
            if event_id not in results:
                await self._on_loop(services.flows.expire_event(event_id))
                results = await self._on_loop(services.flows.results_of([event_id]))
        result = results[event_id]
        if result.status is not TaskStatus.SUCCESS:
            raise WaitTimeout(f"event {event!r} was not sent in time")
        return _converted(result.result, kind, event)

    async def _wait_for_shared(self, event_id: str, kind: Any, seconds: float | None) -> Any:
        """Wait for an event that belongs to no task. The event has no deadline, but this wait may have one."""
        services = self._services
        task = event_task(event_id, created_at=services.clock.now())
        await self._on_loop(services.flows.add_event(task))
        until = None if seconds is None else await self._deadline(f"event {event_id}", seconds)
        results = await self._wait_until_ended([event_id], None, until)
        if event_id not in results or results[event_id].status is not TaskStatus.SUCCESS:
            raise WaitTimeout(f"event {event_id!r} was not sent in time")
        return _converted(results[event_id].result, kind, event_id)


def _id_of(waitable: Any) -> str:
    task_id = waitable if isinstance(waitable, str) else getattr(waitable, "id", None)
    if not isinstance(task_id, str):
        raise InvalidTask(
            f"ctx.wait: {waitable!r:.80}: expected a child, a handle of a task or a flow, or an id"
        )
    return task_id


def _children_failed(failures: Sequence[TaskResult]) -> ChildrenFailed:
    first = failures[0]
    error = first.error
    why = first.reason or "it was cancelled"
    if error is not None:
        why = f"{error.error_type}: {error.message}"
    others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return ChildrenFailed(f"{first.task_id} did not succeed: {why}{others}", failures=failures)


def _simple_name(kind: Any) -> str | None:
    return next((name for name, simple in _SIMPLE.items() if simple is kind), None)


def check_value(name: str, kind: str | None, value: Any) -> None:
    """Refuse a value of the wrong type for an event of a simple type."""
    expected = _SIMPLE.get(kind or "")
    if expected is None or type(value) is expected or (expected is float and type(value) is int):
        return
    raise InvalidTask(f"event {name}: expected {kind}, and not {type(value).__name__}")


def _converted(value: Any, kind: Any, event: str) -> Any:
    if kind is None or kind is object:
        return value
    from omniq.tasks.annotations import load_value, rich_converter

    name = _simple_name(kind)
    try:
        check_value(event, name, value)
        converter = None if name is not None else rich_converter(kind)
        return value if converter is None else load_value(converter, value, f"event {event!r}")
    except (SerializationError, InvalidTask) as error:
        raise PermanentError(f"the value of event {event!r} does not fit: {error}") from None
