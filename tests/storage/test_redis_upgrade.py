"""A store that version 1 of the layout has written is upgraded when it is opened, and nothing is lost.

`data/redis_version_1.json` has the keys of such a store, with two tasks in each state. Its worker was killed
while it held three of them.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from omniq.errors import StorageError
from omniq.models import TaskStatus
from omniq.outcomes import Succeeded
from omniq.storage.redis import RedisStorage, upgrade
from omniq.storage.redis.scripts import Scripts
from omniq.testing.builders import a_result, a_task
from omniq.testing.clock import ManualClock

STORE = Path(__file__).parent / "data/redis_version_1.json"
OWNER = "01KDWPVNG00000000000000002"
LISTED = (
    "can",
    "dead",
    "delayed",
    "done",
    "every",
    "expiring",
    "gated",
    "held",
    "live",
    "only",
    "retry",
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def server_url(redis_url):
    return redis_url.partition("?")[0]


@pytest.fixture
def prefix(redis_url):
    return redis_url.partition("?prefix=")[2]


@pytest.fixture
async def admin(server_url, prefix):
    """A client of a server that has the old store."""
    async with Redis.from_url(server_url) as admin:
        for name, (kind, value) in json.loads(STORE.read_text()).items():
            key = f"{{{prefix}}}:{name}"
            match kind:
                case "string":
                    await admin.set(key, b64decode(value))
                case "hash":
                    fields: dict[Any, Any] = {
                        b64decode(field): b64decode(data) for field, data in value.items()
                    }
                    await admin.hset(key, mapping=fields)
                case "set":
                    await admin.sadd(key, *map(b64decode, value))
                case "zset":
                    await admin.zadd(
                        key, {b64decode(member): score for member, score in value.items()}
                    )
        yield admin


@pytest.fixture
def make(server_url, prefix, clock, admin):
    return lambda: RedisStorage(server_url, prefix=prefix, clock=clock)


async def check_everything_is_there(storage):
    stats = await storage.stats()
    assert stats.dead == 4
    assert {status.value: count for status, count in stats.by_status.items()} == {
        "pending": 11,
        "running": 3,
        "retrying": 2,
        "success": 2,
        "failed": 2,
        "cancelled": 2,
    }
    tasks = await storage.list_tasks()
    assert [task.id for task in tasks] == sorted(f"{name}{n}" for name in LISTED for n in (0, 1))
    assert {task.id for task in tasks if task.status is TaskStatus.RUNNING} == {
        *("gated0", "held0", "held1"),
    }
    result = await storage.get_result("done1")
    assert result is not None
    assert result.result == "done1"
    newest = await storage.get_result("every0")
    assert newest is not None
    assert newest.result == 5
    assert len(await storage.history("retry0")) == 2
    letter = await storage.get_dead("deadonly0")
    assert letter is not None
    assert letter.checkpoint == b"cpdeadonly0"
    assert await storage.load_checkpoint("held0") == b"cpheld0"
    progress = await storage.get_progress("held1")
    assert progress is not None
    assert progress.fraction == 0.5
    assert [schedule.id for schedule in await storage.list_schedules()] == ["s0", "s1"]
    assert await storage.paused_queues() == {"paused-q"}
    assert set(await storage.gates()) >= {"running:k/1", "rate:r"}
    assert await storage.enqueue(a_task("again", unique="u/0")) == "only0"
    assert await storage.held_by(OWNER) == {"gated0": 1, "held0": 1, "held1": 1}


async def test_everything_of_an_old_store_is_there_and_runs(make, clock):
    async with make() as storage:
        await check_everything_is_there(storage)
        clock.advance(timedelta(hours=2))
        given_back = await storage.give_back_abandoned()
        assert {back.task_id for back in given_back} == {"gated0", "held0", "held1"}
        assert await storage.retry_dead("deadonly0")

        done: set[str] = set()
        while tasks := await storage.reserve(100):
            done |= {task.id for task in tasks}
            recorded = await storage.record(
                [Succeeded(task.id, task.token, a_result(task)) for task in tasks]
            )
            assert all(recorded)

    waiting = {f"{name}{n}" for name in LISTED for n in (0, 1)} - {
        *("can0", "can1", "dead0", "dead1", "done0", "done1"),
    }
    # It was cancelled while it ran.
    assert done == (waiting | {"deadonly0"}) - {"held0"}


async def test_what_is_left_of_the_old_store_is_closed_to_its_workers(make, admin, prefix):
    async with make() as storage:
        await storage.enqueue(a_task("new"))
    keys = {key.decode() async for key in admin.scan_iter(f"{{{prefix}}}:*")}
    old = {key for key in keys if not key.startswith(f"{{{prefix}}}:2:")}

    assert {f"{{{prefix}}}:{name}" for name in ("tasks", "places", "ready", "leases")} <= old
    for key in old:
        assert b"newer format" in await admin.get(key)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await admin.hget(f"{{{prefix}}}:places", "held0")


@pytest.mark.parametrize("steps", range(1, 12))
async def test_an_upgrade_that_was_interrupted_goes_on_when_the_store_is_opened_again(
    make, monkeypatch, steps
):
    monkeypatch.setattr(upgrade, "_PIECE", 5)
    run, left = Scripts.run, steps

    async def run_some(self, name, *arguments):
        nonlocal left
        if name in ("prepare", "upgrade"):
            left -= 1
            if left < 0:
                raise StorageError("killed")
        return await run(self, name, *arguments)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Scripts, "run", run_some)
        with pytest.raises(StorageError):
            await make().open()
    async with make() as storage:
        await check_everything_is_there(storage)


async def test_several_workers_may_upgrade_a_store_at_once(make):
    storages = [make() for _ in range(4)]
    await asyncio.gather(*(storage.open() for storage in storages))
    try:
        await check_everything_is_there(storages[0])
    finally:
        for storage in storages:
            await storage.close()
