"""Taskiq with the stream broker of taskiq-redis: `task.kiq` and `taskiq worker`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from redis import Redis
from taskiq_redis import RedisStreamBroker

from chaos.peers.workload import CONCURRENCY, SETTINGS, URL, acknowledged, run_async, tasks

broker = RedisStreamBroker(url=URL, **SETTINGS)


@broker.task
async def work_on(task_id: str, seconds: float) -> None:
    await run_async(task_id, seconds)


async def _produce() -> None:
    await broker.startup()
    for task_id, seconds in tasks():
        await work_on.kiq(task_id, seconds)
        acknowledged(task_id)


def produce() -> None:
    asyncio.run(_produce())


def work() -> None:
    command = f"{os.path.dirname(sys.executable)}/taskiq"
    size = ["--workers", "1", "--max-async-tasks", str(CONCURRENCY)]
    os.execv(command, [command, "worker", f"{__name__}:broker", *size])


def left() -> Iterator[tuple[str, str]]:
    redis: Any = Redis.from_url(URL)
    waiting = redis.xpending_range("taskiq", "taskiq", "-", "+", 10_000)
    unacknowledged = {entry["message_id"] for entry in waiting}
    seen = redis.xinfo_groups("taskiq")[0]["last-delivered-id"]
    for message_id, fields in redis.xrange("taskiq"):
        if message_id in unacknowledged or _order(message_id) > _order(seen):
            yield "held", json.loads(fields[b"data"])["args"][0]


def _order(message_id: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in message_id.split(b"-"))
