"""The parts of a pool that have to be closed again, and its side loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.models import Runnable
from omniq.storage.base import BaseStorage
from omniq.tasks.functions import FunctionCache
from omniq.worker.executors.execution import Execution
from omniq.worker.executors.process_executor import ProcessExecutor
from omniq.worker.executors.thread_executor import ThreadExecutor
from omniq.worker.pool_config import PoolConfig
from omniq.worker.problems import ProblemReports
from omniq.worker.resources import WorkerResources

_RESTART_PAUSE = 0.1


class OpenParts:
    """What a pool has opened. It is closed in reverse order, and a part that fails does not stop the rest."""

    def __init__(
        self,
        stack: AsyncExitStack,
        clock: Clock,
        problems: ProblemReports,
        limit: Callable[[], float | None],
    ) -> None:
        """`limit`: how many seconds the application's code may take to close what it has opened."""
        self._problems = problems
        self._limit = limit
        self._stack = stack
        self._clock = clock
        self.report = problems.report_final
        self.callback = stack.callback
        """Add a function that is called at the end."""

    def on_exit(
        self, name: str, close: Callable[[], Awaitable[None]], *, is_limited: bool = False
    ) -> None:
        """Call `close` at the end; a failure is reported. `is_limited`: it calls the application's code."""

        async def close_and_report() -> None:
            try:
                async with asyncio.timeout(self._limit() if is_limited else None):
                    await close()
            except Exception as error:
                self.report(name, error)

        self._stack.push_async_callback(close_and_report)

    def start_loops(self, **loops: Callable[[], Awaitable[None]]) -> None:
        """Start loops that run until the end."""
        for name, loop in loops.items():
            side_task = asyncio.get_running_loop().create_task(
                self._repeat(name, loop), name=f"omniq-{name}"
            )
            self._stack.push_async_callback(_cancel, side_task)

    async def _repeat(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run it as long as the pool runs; a failure is reported, and the loop is started again."""
        while True:
            try:
                await loop()
            except Exception as error:
                self._problems.report(name, error)
            await self._clock.sleep(_RESTART_PAUSE)


async def take_lease(storage: BaseStorage, config: PoolConfig, runnable: Runnable) -> None:
    """Take the lease of a pool that starts."""
    for is_last in (False, True):
        try:
            await storage.renew(
                lease=config.lease,
                concurrency=config.concurrency,
                queues=config.queues or (),
                runnable=runnable,
            )
            return
        except LeaseLost:
            # The last user of this storage was fenced; the storage has a fresh id now.
            if is_last:
                raise


def make_execution(
    parts: OpenParts,
    storage: BaseStorage,
    config: PoolConfig,
    functions: FunctionCache,
    threads: ThreadExecutor,
) -> Execution:
    """What runs one task, on the event loop, in a thread or in a child process."""
    processes = ProcessExecutor(
        storage.settings,
        storage.serializer,
        storage.clock,
        errors=config.errors,
        lifespan=config.lifespan,
    )
    parts.on_exit("close processes", processes.close)
    resources = WorkerResources(
        lambda name, error: parts.report(f"close resource {name}", error),
        storage.settings.start_timeout,
    )
    parts.on_exit("close resources", resources.close, is_limited=True)
    return Execution(
        functions,
        clock=storage.clock,
        serializer=storage.serializer,
        base_retry_delay=config.base_retry_delay,
        errors=config.errors,
        threads=threads,
        processes=processes,
        resources=resources,
        middleware=config.middleware,
    )


async def _cancel(side_task: asyncio.Task[None]) -> None:
    side_task.cancel()
    await asyncio.wait((side_task,))
