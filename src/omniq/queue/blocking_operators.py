"""What operators see and change, on a queue for blocking code: the methods of `operators`, run through a portal."""

from __future__ import annotations

from omniq.concurrency.blocking import BlockingFace, blocking
from omniq.queue.operators import (
    AsyncBreakers,
    AsyncFunctions,
    AsyncLimits,
    AsyncQueues,
    AsyncWorkers,
)
from omniq.tasks.durations import Duration, seconds_of


def _answer_time(worker_id: str, timeout: Duration = 10) -> float:
    """How long the call waits for the worker."""
    return seconds_of("timeout", timeout)


class Queues(BlockingFace[AsyncQueues]):
    """The named queues of a storage. The blocking form of `AsyncQueues`."""

    list = blocking(AsyncQueues.list)
    paused = blocking(AsyncQueues.paused)
    pause = blocking(AsyncQueues.pause)
    resume = blocking(AsyncQueues.resume)


class Functions(BlockingFace[AsyncFunctions]):
    """The pauses of functions. The blocking form of `AsyncFunctions`."""

    paused = blocking(AsyncFunctions.paused)
    pause = blocking(AsyncFunctions.pause)
    resume = blocking(AsyncFunctions.resume)


class Workers(BlockingFace[AsyncWorkers]):
    """The live workers of a storage. The blocking form of `AsyncWorkers`."""

    list = blocking(AsyncWorkers.list)
    __call__ = blocking(AsyncWorkers.__call__)
    get = blocking(AsyncWorkers.get)
    pause = blocking(AsyncWorkers.pause)
    resume = blocking(AsyncWorkers.resume)
    stop = blocking(AsyncWorkers.stop)
    set_slots = blocking(AsyncWorkers.set_slots)
    ping = blocking(AsyncWorkers.ping, _answer_time)
    functions = blocking(AsyncWorkers.functions, _answer_time)


class Breakers(BlockingFace[AsyncBreakers]):
    """The breakers that tasks share. The blocking form of `AsyncBreakers`."""

    list = blocking(AsyncBreakers.list)
    __call__ = blocking(AsyncBreakers.__call__)
    get = blocking(AsyncBreakers.get)
    close = blocking(AsyncBreakers.close)


class Limits(BlockingFace[AsyncLimits]):
    """The running limits and rate limits that tasks share. The blocking form of `AsyncLimits`."""

    list = blocking(AsyncLimits.list)
    get = blocking(AsyncLimits.get)
    set = blocking(AsyncLimits.set)
    reset = blocking(AsyncLimits.reset)
    hold = blocking(AsyncLimits.hold)
    release = blocking(AsyncLimits.release)
