"""Dramatiq: one process with 8 threads."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.run_context import URL, exec_module, record_start

PACKAGES = ["dramatiq[redis]", "hiredis"]
STORES = ["redis"]
KEEPS = "nothing"

broker = RedisBroker(url=URL)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(number: int) -> None:
    record_start(number)


def open() -> None:
    """Do nothing: the broker connects when it is used."""


def close() -> None:
    broker.client.close()


def one(number: int) -> None:
    noop.send(number)


def work() -> None:
    exec_module("dramatiq", __name__, "--processes", 1, "--threads", 8)
