"""What operators see and change, on a queue for async code: queues, functions, workers, breakers and limits.

Each is an object with `list`, and with what can be done to one of its things. `blocking_operators` has
the same for blocking code.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from omniq.errors import InvalidValue
from omniq.models import Pong, WorkerInfo
from omniq.operations.health import BreakerInfo, breakers_of, live_workers
from omniq.operations.limits import LimitInfo, limits_of
from omniq.operations.overview import QueueInfo, queue_summaries
from omniq.storage import BaseStorage
from omniq.storage.pauses import Pause
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.functions import path_of
from omniq.tasks.options import rate_of


class _Operator:
    """A part of a queue for operators."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage


class AsyncQueues(_Operator):
    """The named queues of a storage: `queue.queues`."""

    async def list(self) -> list[QueueInfo]:
        """Return the queues that have tasks, are paused, are named by a worker, or had a run in 30 days."""
        return await queue_summaries(self._storage)

    async def paused(self) -> frozenset[str]:
        """Return the names of the paused queues. Counts nothing, so it is cheaper than `list`."""
        return await self._storage.paused_queues()

    async def pause(
        self, name: str, *, reason: str = "", until: datetime | Duration | None = None
    ) -> None:
        """Stop the claims from a queue until it is resumed, or until a time. Its running tasks continue.

        Tasks can still be enqueued, and wait. The pause is stored: it applies to all workers, also
        to those that start later. `until` is an instant, or for how long from now.
        """
        ends = _end_of(self._storage, until)
        await self._storage.pause_queue(name, reason=reason, until=ends)

    async def resume(self, name: str) -> None:
        """Allow claims from the queue again."""
        await self._storage.resume_queue(name)


class AsyncFunctions(_Operator):
    """The pauses of functions: `queue.functions`."""

    async def paused(self) -> list[Pause]:
        """Return the pauses of functions, in order of their paths, with reason and end."""
        found = [each for each in await self._storage.pauses() if each.function is not None]
        return sorted(found, key=lambda each: each.name)

    async def pause(
        self,
        func: Callable[..., Any] | str,
        *,
        reason: str = "",
        until: datetime | Duration | None = None,
    ) -> None:
        """Stop the claims of a function's tasks, from all queues, until it is resumed or until a time.

        Its running tasks continue, others can be enqueued, and no task of another function waits for it.
        The pause is stored: it applies to all workers. `until` is an instant, or for how long from now.
        """
        ends = _end_of(self._storage, until)
        await self._storage.pause_function(path_of(func), reason=reason, until=ends)

    async def resume(self, func: Callable[..., Any] | str) -> None:
        """Allow claims of the function's tasks again."""
        await self._storage.resume_function(path_of(func))


def _end_of(storage: BaseStorage, until: datetime | Duration | None) -> datetime | None:
    if until is None or isinstance(until, datetime):
        return until
    seconds = seconds_of("until", until, above_zero=True, error=InvalidValue)
    return storage.clock.now() + timedelta(seconds=seconds)


class AsyncWorkers(_Operator):
    """The live workers of a storage: `queue.workers`. `queue.workers()` is `queue.workers.list()`."""

    async def __call__(self) -> list[WorkerInfo]:
        """Return the live workers with the tasks they run; `stalled` ones make no progress."""
        return await self.list()

    async def list(self) -> list[WorkerInfo]:
        """Return the live workers with the tasks they run; `stalled` ones make no progress."""
        return await live_workers(self._storage)

    async def get(self, worker_id: str) -> WorkerInfo | None:
        """Return one live worker; None if none has this id."""
        found = (worker for worker in await self.list() if worker.id == worker_id)
        return next(found, None)

    async def pause(self, worker_id: str) -> bool:
        """Stop the claims of one worker; False if it is not alive. Its running tasks continue.

        The worker reads the request at its next heartbeat. The pause ends when the worker is resumed or ends.
        """
        return await self._storage.pause_worker(worker_id)

    async def resume(self, worker_id: str) -> bool:
        """Allow the worker to claim again; False if it is not alive."""
        return await self._storage.resume_worker(worker_id)

    async def stop(self, worker_id: str, *, restart: bool = False) -> bool:
        """Ask one worker to stop; False if it is not alive. Returns before the worker has stopped.

        The worker reads it at its next heartbeat, within three seconds, and stops as after SIGTERM: it
        claims nothing more, and its running tasks have the shutdown timeout to finish. `omniq worker
        --processes` does not start another in its place, unless `restart` is given; a pool inside an
        application is not started again.
        """
        return await self._storage.stop_worker(worker_id, restart=restart)

    async def set_slots(self, worker_id: str, slots: int) -> bool:
        """Ask one worker to run at most `slots` tasks at a time; False if it is not alive.

        The worker reads it at its next heartbeat, within three seconds. Tasks that run already continue,
        also if they are more. A worker that is started again has the slots of its settings.
        """
        return await self._storage.set_slots(worker_id, slots)

    async def ping(self, worker_id: str, timeout: Duration = 10) -> Pong | None:
        """Check that one worker answers; None if it does not within `timeout` seconds.

        The worker answers at its next heartbeat, also while a task blocks its event loop.
        """
        return await self._storage.ping_worker(worker_id, seconds_of("timeout", timeout))

    async def functions(self, worker_id: str, timeout: Duration = 10) -> tuple[str, ...] | None:
        """Return the functions that one worker has, by path, name and alias; None without an answer."""
        pong = await self.ping(worker_id, timeout)
        return None if pong is None else pong.functions


class AsyncBreakers(_Operator):
    """The breakers that tasks share: `queue.breakers`. `queue.breakers()` is `queue.breakers.list()`."""

    async def __call__(self) -> list[BreakerInfo]:
        """Return the circuit breakers that tasks name, in name order, each with state and reason."""
        return await self.list()

    async def list(self) -> list[BreakerInfo]:
        """Return the circuit breakers that tasks name, in name order, each with state and reason."""
        return await breakers_of(self._storage)

    async def get(self, name: str) -> BreakerInfo | None:
        """Return one breaker; None if no claimed task has named it."""
        found = (breaker for breaker in await self.list() if breaker.name == name)
        return next(found, None)

    async def close(self, name: str) -> bool:
        """Close a breaker without waiting for a probe; False if no claimed task has named it.

        Its tasks are claimed again, and its failures are counted from 0.
        """
        return await self._storage.close_breaker(name)


class AsyncLimits(_Operator):
    """The running limits and rate limits that tasks share: `queue.limits`."""

    async def list(self) -> list[LimitInfo]:
        """Return the limits in order of their keys, each with the tasks that hold it."""
        return await limits_of(self._storage)

    async def get(self, key: str) -> LimitInfo | None:
        """Return one limit; None if no task has named it."""
        found = (limit for limit in await self.list() if limit.key == key)
        return next(found, None)

    async def set(
        self,
        key: str,
        *,
        max_running: int | None = None,
        rate: str | tuple[int, Duration] | None = None,
    ) -> bool:
        """Give a limit other numbers than its tasks say, for all workers and until it is reset.

        `rate` is text such as "100/5m", or a number of starts and seconds. Tasks that hold more than it allows continue.
        Returns False if no task names this limit now: the key may be wrong, or its tasks come later.
        """
        starts = None if rate is None else rate_of("rate", rate)
        await self._storage.set_limit(key, max_running=max_running, rate=starts)
        return await self._is_named(key)

    async def reset(self, key: str) -> bool:
        """Have a limit admit what its tasks say again; False if it was not changed."""
        known = await self.get(key)
        await self._storage.reset_limit(key)
        return known is not None and known.is_changed

    async def hold(
        self, key: str, *, reason: str = "", until: datetime | Duration | None = None
    ) -> bool:
        """Have a limit admit no task until it is released, or until a time. What runs continues.

        `until` is an instant, or for how long from now. Returns False if no task names this limit now.
        """
        await self._storage.hold_limit(key, reason=reason, until=_end_of(self._storage, until))
        return await self._is_named(key)

    async def release(self, key: str) -> bool:
        """Have a limit that is held admit tasks again; False if it was not held."""
        known = await self.get(key)
        await self._storage.release_limit(key)
        return known is not None and known.is_held

    async def _is_named(self, key: str) -> bool:
        known = await self.get(key)
        return known is not None and known.is_named
