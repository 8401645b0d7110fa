"""Dramatiq: one process with 8 threads."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.place import URL, become, mark

PACKAGES = ["dramatiq[redis]", "hiredis"]
STORES = ["redis"]
KEEPS = "nothing"

broker = RedisBroker(url=URL)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(number: int) -> None:
    mark(number)


def open() -> None:
    """The broker connects by itself."""


def close() -> None:
    broker.client.close()


def one(number: int) -> None:
    noop.send(number)


def work() -> None:
    become("dramatiq", __name__, "--processes", 1, "--threads", 8)
