"""The limits that the script `record_and_claim` applies are those of the rules, in random games."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from omniq.models import Limit
from omniq.storage.redis import RedisStorage
from omniq.testing.builders import a_task, some_tasks
from omniq.testing.clock import ManualClock
from tests.storage.limit_games import play


def new_storage(redis_url, name, clock):
    url, _, prefix = redis_url.partition("?prefix=")
    return RedisStorage(url, prefix=f"{prefix}-{name}", clock=clock)


@pytest.mark.parametrize("seed", range(5))
async def test_the_script_applies_limits_as_the_rules_do(redis_url, seed):
    await play(seed, partial(new_storage, redis_url))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5, 105))
async def test_the_script_applies_limits_as_the_rules_do_in_many_games(redis_url, seed):
    await play(seed, partial(new_storage, redis_url))


async def test_a_damaged_task_leaves_the_limit_that_the_script_has_counted_it_in(redis_url):
    async with open_redis(redis_url) as storage:
        await storage.enqueue_many(some_tasks("ab", limits=(Limit(key="k", max_running=1),)))
        await damage(storage, "a", lambda state: {**state, "result_ttl": "x"})

        assert await storage.reserve(2) == []
        assert [task.id for task in await storage.reserve(2)] == ["b"]
        assert [letter.task_id for letter in await storage.list_dead()] == ["a"]


async def test_a_gate_that_no_engine_can_decode_admits_no_task(redis_url):
    async with open_redis(redis_url) as storage:
        await storage.enqueue_many(some_tasks("ab", limits=(Limit(key="k", max_running=1),)))
        await damage(storage, "a", lambda state: {**state, "gates": [_with_size(state, 1e308)]})

        assert [task.id for task in await storage.reserve(2)] == ["b"]
        assert [letter.task_id for letter in await storage.list_dead()] == ["a"]


async def test_a_damaged_task_that_is_the_first_of_a_rate_stops_no_claim(redis_url):
    clock = ManualClock()
    async with open_redis(redis_url, clock) as storage:
        await storage.enqueue_many(some_tasks("abc", limits=(Limit(key="k", rate=1, per=5.0),)))
        assert [task.id for task in await storage.reserve(3)] == ["a"]
        await damage(storage, "b", lambda state: 0)
        await storage.enqueue(a_task("plain"))
        clock.advance(5)

        claimed = await storage.reserve(3) + await storage.reserve(3)

        assert sorted(task.id for task in claimed) == ["c", "plain"]
        assert [letter.task_id for letter in await storage.list_dead()] == ["b"]


def open_redis(redis_url, clock=None):
    url, _, prefix = redis_url.partition("?prefix=")
    return RedisStorage(url, prefix=prefix, clock=clock or ManualClock())


async def damage(storage, task_id, change):
    """Change the state in the record of a task that has not run."""
    scripts = storage._backend.scripts
    record = await scripts.command("HGET", scripts.key("tasks"), task_id)
    created_at, size, rest = record.split(b"/", 2)
    state, body = rest[: int(size)], rest[int(size) :]
    changed = msgspec.msgpack.encode(change(msgspec.msgpack.decode(state)))
    record = b"%s/%d/%s%s" % (created_at, len(changed), changed, body)
    await scripts.command("HSET", scripts.key("tasks"), task_id, record)


def _with_size(state, size):
    return {**state["gates"][0], "size": size}
