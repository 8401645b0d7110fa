"""Dramatiq on Redis: `actor.send` and the `dramatiq` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run, tasks

broker = RedisBroker(url=URL, **SETTINGS)
dramatiq.set_broker(broker)


@dramatiq.actor
def work_on(task_id: str, seconds: float) -> None:
    run(task_id, seconds)


def produce() -> None:
    for task_id, seconds in tasks():
        work_on.send(task_id, seconds)
        acknowledged(task_id)


def work() -> None:
    threads = ["--processes", "1", "--threads", str(CONCURRENCY)]
    os.execv(sys.executable, [sys.executable, "-m", "dramatiq", __name__, *threads])


def left() -> Iterator[tuple[str, str]]:
    # A message stays in this hash until it is acknowledged; XQ has those that failed for good.
    for queue, state in (("default", "held"), ("default.DQ", "held"), ("default.XQ", "failed")):
        for message in broker.client.hvals(f"dramatiq:{queue}.msgs"):
            yield state, dramatiq.Message.decode(message).args[0]
