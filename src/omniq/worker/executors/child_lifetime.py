"""What lives as long as a child process: its lifespan, its resources, and their event loop.

A child whose tasks need neither has none of this. The event loop runs only while a task does.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from omniq.concurrency.coroutines import run_without_loop
from omniq.errors import InvalidTask
from omniq.models import PermanentError
from omniq.tasks.context import TaskContext
from omniq.tasks.resources import Resource
from omniq.tasks.signature import Callee
from omniq.worker.lifespan import LifespanState, lifespan_of
from omniq.worker.resources import Blocking, Injector, Needs, OnLoop, WorkerResources

NOT_IMPORTABLE = (
    "the lifespan of this worker cannot be imported by its child processes, so there is no ctx.state: "
    "define it at the top of a module"
)


class ChildLifetime:
    """Enters the lifespan before the first task, makes resources, and closes all at the end."""

    def __init__(
        self,
        lifespan: str | None,
        state: LifespanState,
        report: Callable[[str, Exception], None],
        timeout: float,
    ) -> None:
        """`lifespan` is its path. `report(name, error)` is called when closing fails.

        Entering the lifespan may take `timeout` seconds, and so may making each resource.
        """
        self._path = lifespan
        self._state = state
        self._report = report
        self._timeout = timeout
        self._runner: asyncio.Runner | None = None
        self._resources: WorkerResources | None = None
        self._injectors: dict[Callable[..., Any], Injector] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to close."""
        return self._resources is None or self._resources.is_empty

    def enter(self) -> None:
        """Enter the lifespan, if there is one and it is not entered; raises what it raises."""
        if self._path is not None:
            # A resource that is made first is closed last.
            lifespan = Resource(lifespan_of(self._path))
            get = self._made_resources().get(lifespan, Needs(False, ()), OnLoop())
            self._state.set(self.run(get))
            self._path = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run async code on the event loop of the process, or on a new one if it has none."""
        if self._runner is None:
            return asyncio.run(work)
        return self._runner.run(work, context=contextvars.copy_context())

    def call(
        self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], context: TaskContext
    ) -> Any:
        """Call a function that has resources."""
        assert callee.inject is not None
        injector = self._injectors.get(callee.inject)
        if injector is None:
            try:
                injector = self._injectors[callee.inject] = Injector(
                    callee.types.resources, in_batch=callee.batch is not None
                )
            except InvalidTask as error:
                raise PermanentError(str(error), error_type=type(error).__name__) from None
        values = self.run(injector.of_worker(self._made_resources(), OnLoop()))
        inject = partial(callee.inject, args, kwargs)
        if callee.is_coroutine:
            return self.run(injector.call(inject, values, context, OnLoop()))
        return run_without_loop(injector.call(inject, values, context, Blocking(self.run)))

    def wait_for(self, value: Any) -> Any:
        """Return the value of a function; one that can be awaited is awaited."""
        return self.run(_wait_for(value)) if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Close the resources, the newest first, and then the lifespan."""
        if self._runner is not None and self._resources is not None:
            self._runner.run(self._resources.close())
            self._runner.close()

    def _made_resources(self) -> WorkerResources:
        if self._resources is None:
            self._runner = asyncio.Runner()
            # A new context: what belongs to the first task must not leak into what outlives it.
            self._resources = self._runner.run(
                self._make_resources(), context=contextvars.Context()
            )
        return self._resources

    async def _make_resources(self) -> WorkerResources:
        return WorkerResources(self._report, self._timeout)


async def _wait_for(value: Any) -> Any:
    return await value
