"""Celery on Redis: `task.delay` and the `celery` command with its default pool of processes."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator

from celery import Celery
from redis import Redis

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run, tasks

app = Celery("peers", broker=URL)
app.conf.update(SETTINGS)


@app.task
def work_on(task_id: str, seconds: float) -> None:
    run(task_id, seconds)


def produce() -> None:
    for task_id, seconds in tasks():
        work_on.delay(task_id, seconds)
        acknowledged(task_id)


def work() -> None:
    # Workers on one machine need different names.
    name = ["--hostname", f"{os.getpid()}@%h", "--concurrency", str(CONCURRENCY)]
    os.execv(sys.executable, [sys.executable, "-m", "celery", "-A", __name__, "worker", *name])


def left() -> Iterator[tuple[str, str]]:
    redis = Redis.from_url(URL)
    messages = [json.loads(message) for message in redis.lrange("celery", 0, -1)]
    # Unacknowledged messages return to the queue after the visibility timeout.
    messages += [json.loads(message)[0] for message in redis.hvals("unacked")]
    for message in messages:
        args, _, _ = json.loads(base64.b64decode(message["body"]))
        yield "held", args[0]
