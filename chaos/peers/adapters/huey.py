"""Huey: a decorated function and `huey_consumer`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from huey import RedisHuey

from chaos.peers.workload import CONCURRENCY, URL, acknowledged, run, tasks

huey = RedisHuey("peers", url=URL)


@huey.task()
def work_on(task_id: str, seconds: float) -> None:
    run(task_id, seconds)


def produce() -> None:
    for task_id, seconds in tasks():
        work_on(task_id, seconds)
        acknowledged(task_id)


def work() -> None:
    consumer = f"{os.path.dirname(sys.executable)}/huey_consumer"
    os.execv(consumer, [consumer, f"{__name__}.huey", "-w", str(CONCURRENCY)])


def left() -> Iterator[tuple[str, str]]:
    for waiting in huey.pending():
        yield "held", waiting.args[0]
