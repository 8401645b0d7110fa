"""The resources of one worker process: made when a run first needs them, closed in reverse order."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from pathlib import PurePath
from typing import Any, Protocol

from omniq.errors import InvalidTask
from omniq.tasks.arguments import hints_of, is_context
from omniq.tasks.context import TaskContext
from omniq.tasks.resources import Resource, ResourceParameter, resource_parameters

CLOSE_SECONDS = 10.0
"""How long closing one resource may take."""

_CANCEL_SECONDS = 1.0
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

# Context managers that are values: to enter a lock would be to hold it as long as the worker lives.
_NEVER_ENTERED = (
    asyncio.Lock,
    asyncio.Semaphore,
    asyncio.Condition,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Semaphore,
    PurePath,
)


# Which resources a function needs, and in which order


@dataclass(frozen=True, slots=True)
class Needs:
    """What the function that makes a resource needs: the context of the run, and other resources."""

    takes_context: bool
    resources: tuple[tuple[str, Resource], ...]


def needs_of(resource: Resource) -> Needs:
    """Read the parameters of the function that makes the resource. Raises `InvalidTask`."""
    try:
        signature = inspect.signature(resource.make)
    except ValueError:
        # A class of an extension, without a signature.
        return Needs(False, ())
    hints = hints_of(_function_of(resource.make), signature)
    parameters = list(signature.parameters.values())
    takes_context = bool(parameters) and is_context(parameters[0], hints)
    if takes_context and resource.scope == "worker":
        raise InvalidTask(
            f"the resource {resource.name} takes a TaskContext: give it scope='run', since runs "
            "cannot share it"
        )
    own = parameters[takes_context:]
    found = resource_parameters(own, hints)
    names = {each.name for each in found}
    for parameter in own:
        is_needed = parameter.default is Parameter.empty and parameter.kind not in _VARIABLE
        if is_needed and parameter.name not in names:
            raise InvalidTask(
                f"the resource {resource.name} has a parameter {parameter.name!r}: give it a default, "
                "or make it a resource with Annotated[…, Resource(…)]"
            )
    return Needs(takes_context, tuple((each.name, each.resource) for each in found))


def in_order(resources: Iterable[Resource]) -> dict[Resource, Needs]:
    """Return the resources and those that they need, each after what it needs. Raises `InvalidTask`."""
    ordered: dict[Resource, Needs] = {}
    _add(resources, ordered, [])
    return ordered


def _add(
    resources: Iterable[Resource], ordered: dict[Resource, Needs], above: list[Resource]
) -> None:
    for resource in resources:
        if resource in above:
            circle = " needs ".join(each.name for each in [*above, resource])
            raise InvalidTask(f"resources need each other in a circle: {circle}")
        if above and above[-1].scope == "worker" and resource.scope == "run":
            raise InvalidTask(
                f"the resource {above[-1].name} is made once for a worker, and cannot need "
                f"{resource.name}, which is made for each run"
            )
        if resource not in ordered:
            needs = needs_of(resource)
            _add((each for _, each in needs.resources), ordered, [*above, resource])
            ordered[resource] = needs


def _function_of(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose names the annotations use."""
    if isinstance(make, functools.partial):
        make = make.func
    if isinstance(make, type):
        found: Callable[..., Any] = make.__init__  # type: ignore[misc]
        return found
    if not inspect.isroutine(make):
        called: Callable[..., Any] = type(make).__call__
        return called
    return make


# Where they are made


class Place(Protocol):
    """Where the code of a resource runs."""

    async def call(self, func: Callable[[], Any]) -> Any:
        """Call plain code."""

    async def wait(self, work: Awaitable[Any]) -> Any:
        """Run async code to its end."""

    def manager(self, value: Any) -> AbstractAsyncContextManager[Any]:
        """The async context manager, such that one asyncio task enters and leaves it."""


class OnLoop:
    """On the event loop, for async tasks."""

    async def call(self, func: Callable[[], Any]) -> Any:
        return func()

    async def wait(self, work: Awaitable[Any]) -> Any:
        return await work

    def manager(self, value: Any) -> AbstractAsyncContextManager[Any]:
        manager: AbstractAsyncContextManager[Any] = value
        return manager


class InThread(OnLoop):
    """Plain code in a thread, which it may block: for a task that runs in a thread."""

    def __init__(self, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._in_thread = in_thread

    async def call(self, func: Callable[[], Any]) -> Any:
        return await self._in_thread(func)


class Blocking:
    """In a thread without an event loop: its coroutines never suspend, `run` blocks instead."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._run = run

    async def call(self, func: Callable[[], Any]) -> Any:
        return func()

    async def wait(self, work: Awaitable[Any]) -> Any:
        value, error = self._run(_ending(work))
        if error is not None:
            raise error
        return value

    def manager(self, value: Any) -> AbstractAsyncContextManager[Any]:
        return _HeldManager(value)


async def _ending(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The value, or an exception that would end the event loop if an asyncio task raised it."""
    try:
        return await work, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


class _HeldManager:
    """An async context manager that an asyncio task enters, holds and leaves.

    Each `wait` of a thread is another asyncio task, and some libraries insist on one.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._task: asyncio.Task[tuple[Any, BaseException | None]] | None = None
        self._entered = asyncio.Event()
        self._leaving = asyncio.Event()
        self._value: Any = None
        self._details: tuple[Any, ...] = ()

    async def __aenter__(self) -> Any:
        self._task = asyncio.create_task(_ending(self._hold()))
        entered = asyncio.create_task(self._entered.wait())
        try:
            await asyncio.wait((self._task, entered), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            entered.cancel()
        if not self._entered.is_set():
            await self._end(self._task)
        return self._value

    async def __aexit__(self, *details: Any) -> None:
        assert self._task is not None
        self._details = details
        self._leaving.set()
        await self._end(self._task)

    async def _end(self, task: asyncio.Task[tuple[Any, BaseException | None]]) -> None:
        _, error = await task
        if error is not None:
            raise error

    async def _hold(self) -> None:
        kind = type(self._manager)
        self._value = await kind.__aenter__(self._manager)
        self._entered.set()
        await self._leaving.wait()
        await kind.__aexit__(self._manager, *self._details)


async def enter(stack: AsyncExitStack, place: Place, make: Callable[[], Any]) -> Any:
    """Make a value; what has to be left at the end is on the stack. An exit hides no exception."""
    value = await place.call(make)
    if inspect.iscoroutine(value):
        value = await place.wait(value)
    kind = type(value)
    if isinstance(value, _NEVER_ENTERED):
        return value
    if hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__"):
        manager = place.manager(value)
        entered = await place.wait(manager.__aenter__())

        async def leave(*details: Any) -> None:
            await place.wait(manager.__aexit__(*details))

        stack.push_async_exit(leave)
        return entered
    if hasattr(kind, "__enter__") and hasattr(kind, "__exit__"):
        entered = await place.call(partial(kind.__enter__, value))

        async def leave_plain(*details: Any) -> None:
            await place.call(partial(kind.__exit__, value, *details))

        stack.push_async_exit(leave_plain)
        return entered
    return await place.wait(value) if inspect.isawaitable(value) else value


# The resources of a worker


class WorkerResources:
    """Makes the resources of a worker process, on the event loop that it is made in.

    Each has an asyncio task that makes it, waits, and closes it: some libraries insist that the same
    task does both. A run that is cancelled does not end the making; other runs wait for it too. One that
    hangs ends after `timeout` seconds, and the next run tries again.
    """

    def __init__(self, report: Callable[[str, Exception], None], timeout: float) -> None:
        """`report(name, error)` is called when closing a resource fails."""
        self._report = report
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        # Not the context of the run that is first: what belongs to that run must not leak into others.
        self._context = contextvars.copy_context()
        self._keepers: dict[Resource, _Keeper] = {}
        self._made: list[_Keeper] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was made."""
        return not self._keepers

    async def get(self, resource: Resource, needs: Needs, place: Place) -> Any:
        """Return the value of the resource; makes it, if no run has needed it before."""
        keeper = self._keepers.get(resource)
        if keeper is None:
            keeper = self._keepers[resource] = _Keeper(self._loop)
            keeper.task = self._loop.create_task(
                self._keep(keeper, resource, needs, place),
                name=f"omniq-resource-{resource.name}",
                context=self._context.copy(),
            )
        if not keeper.made.done():
            await asyncio.wait((keeper.made,))
        return keeper.made.result()

    async def close(self) -> None:
        """Close all, the newest first. A failure is reported, and the others are closed as well."""
        for keeper in list(self._keepers.values()):
            if not keeper.made.done() and keeper.task is not None:
                keeper.task.cancel()
                await asyncio.wait((keeper.task,), timeout=_CANCEL_SECONDS)
        for keeper in reversed(self._made):
            keeper.closing.set()
            assert keeper.task is not None
            _, late = await asyncio.wait((keeper.task,), timeout=CLOSE_SECONDS)
            if late:
                keeper.task.cancel()
                await asyncio.wait((keeper.task,), timeout=_CANCEL_SECONDS)
        self._keepers.clear()
        self._made.clear()

    async def _keep(self, keeper: _Keeper, resource: Resource, needs: Needs, place: Place) -> None:
        try:
            async with AsyncExitStack() as stack:
                values = {
                    name: await self.get(each, needs_of(each), place)
                    for name, each in needs.resources
                }
                value = await self._enter(stack, place, resource, values)
                self._made.append(keeper)
                keeper.made.set_result(value)
                await keeper.closing.wait()
        except BaseException as error:
            # User code, which may raise anything: a SystemExit here would end the event loop.
            if keeper.made.done():
                self._report(resource.name, _as_exception(error))
                return
            # The next run that needs it tries again.
            self._keepers.pop(resource, None)
            keeper.made.set_exception(_raisable(error, resource))
            # Marks it as retrieved: the run that waited may have been cancelled.
            keeper.made.exception()

    async def _enter(
        self, stack: AsyncExitStack, place: Place, resource: Resource, values: dict[str, Any]
    ) -> Any:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await enter(stack, place, partial(resource.open, **values))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"the resource {resource.name} was not made within {self._timeout:g} s (setting "
                "start_timeout)"
            ) from error


class _Keeper:
    """A resource that is made, or being made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.made: asyncio.Future[Any] = loop.create_future()
        self.closing = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, asyncio.CancelledError):
        return TimeoutError(f"it was not closed within {CLOSE_SECONDS:g} s")
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _raisable(error: BaseException, resource: Resource) -> BaseException:
    """The exception for the runs that wait. A cancellation would look like one of the run."""
    if isinstance(error, asyncio.CancelledError | StopIteration):
        return RuntimeError(f"the resource {resource.name} was not made: {error!r}")
    return error


# The resources of a function


class Injector:
    """The resources of one function: those of the worker first, then those of the run.

    A run is one call: of a function with `@batched`, `in_batch`, it has no context of one task.
    """

    def __init__(
        self, parameters: tuple[ResourceParameter, ...], *, in_batch: bool = False
    ) -> None:
        self._parameters = parameters
        order = in_order(each.resource for each in parameters)
        self._of_worker = [(each, needs) for each, needs in order.items() if each.scope == "worker"]
        self._of_run = [(each, needs) for each, needs in order.items() if each.scope == "run"]
        for resource, needs in self._of_run:
            if in_batch and needs.takes_context:
                raise InvalidTask(
                    f"the resource {resource.name} takes a TaskContext, and a batch is several tasks: give "
                    "the function a first parameter contexts: list[TaskContext]"
                )

    async def of_worker(self, resources: WorkerResources, place: Place) -> dict[Resource, Any]:
        """Return the resources of the worker that the function needs. On the event loop."""
        return {each: await resources.get(each, needs, place) for each, needs in self._of_worker}

    async def call(
        self,
        inject: Callable[[Mapping[str, Any]], Any],
        values: dict[Resource, Any],
        task_context: TaskContext,
        place: Place,
    ) -> Any:
        """Make the resources of the run, call the function with all, and close those of the run."""
        if not self._of_run:
            return await self._call_function(inject, values, place)
        async with AsyncExitStack() as stack:
            for resource, needs in self._of_run:
                args = (task_context,) if needs.takes_context else ()
                named = {name: values[each] for name, each in needs.resources}
                make = partial(resource.open, *args, **named)
                values[resource] = await enter(stack, place, make)
            # Awaited here: then the resources of the run are closed.
            return await self._call_function(inject, values, place)
        raise AssertionError("exits hide no exception")

    async def _call_function(
        self,
        inject: Callable[[Mapping[str, Any]], Any],
        values: Mapping[Resource, Any],
        place: Place,
    ) -> Any:
        value = inject({each.name: values[each.resource] for each in self._parameters})
        return await place.wait(value) if inspect.isawaitable(value) else value
