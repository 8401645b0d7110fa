"""RQ: jobs run in the worker's process instead of a fork for each, which is five times as fast."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis
from rq import Queue, SimpleWorker

from benchmarks.run_context import URL, record_start

PACKAGES = ["rq", "hiredis"]
STORES = ["redis"]
KEEPS = "a result"

redis = Redis.from_url(URL)
queue = Queue(connection=redis)


def noop(number: int) -> None:
    record_start(number)


def open() -> None:
    """Do nothing: it connects when it is used."""


def close() -> None:
    redis.close()


def one(number: int) -> None:
    queue.enqueue(noop, number)


def many(numbers: Sequence[int]) -> None:
    queue.enqueue_many([Queue.prepare_data(noop, (number,)) for number in numbers])


def work() -> None:
    SimpleWorker([queue], connection=redis).work(logging_level="WARNING")
