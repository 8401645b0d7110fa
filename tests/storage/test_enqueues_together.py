"""Concurrent enqueues share their writes, and affect each other in no other way."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from omniq.errors import DuplicateTask, QueueFull
from omniq.models import Task
from omniq.storage import open_storage

CALLERS = 50


@pytest.fixture(params=["memory", "file", "sqlite", "postgres", "redis"])
def url(request, tmp_path):
    match request.param:
        case "memory":
            return "memory://"
        case "file":
            return f"file://{tmp_path}/store?durability=os"
        case "sqlite":
            return f"sqlite:///{tmp_path}/store.db?durability=os"
        case server:
            return request.getfixturevalue(f"{server}_url")


def a_task(number, **options):
    return Task(id=f"t{number}", func_path="m.f", args=(number,), **options)


async def enqueue_together(storage, tasks):
    return await asyncio.gather(*map(storage.enqueue, tasks), return_exceptions=True)


async def test_a_refused_call_does_not_fail_other_calls(url):
    async with open_storage(url) as storage:
        await storage.enqueue(a_task(7))

        answers = await enqueue_together(storage, map(a_task, range(CALLERS)))

        assert isinstance(answers.pop(7), DuplicateTask)
        assert answers == [f"t{number}" for number in range(CALLERS) if number != 7]
        assert await storage.count_waiting() == CALLERS


async def test_of_many_concurrent_calls_with_one_id_the_first_succeeds(url):
    async with open_storage(url) as storage:
        answers = await enqueue_together(storage, [a_task(1) for _ in range(CALLERS)])

        assert answers[0] == "t1"
        assert [type(answer) for answer in answers[1:]] == [DuplicateTask] * (CALLERS - 1)


async def test_callers_with_one_unique_key_get_one_task(url):
    async with open_storage(url) as storage:
        tasks = [a_task(number, unique="k") for number in range(CALLERS)]

        assert await enqueue_together(storage, tasks) == ["t0"] * CALLERS


async def test_concurrent_calls_fill_the_queue_up_to_max_pending(url):
    async with open_storage(f"{url}{'&' if '?' in url else '?'}max_pending=20") as storage:
        answers = await enqueue_together(storage, map(a_task, range(CALLERS)))

        assert answers[:20] == [f"t{number}" for number in range(20)]
        assert [type(answer) for answer in answers[20:]] == [QueueFull] * (CALLERS - 20)


async def test_a_cancelled_call_does_not_stop_other_enqueues(url):
    async with open_storage(url) as storage:
        calls = [asyncio.create_task(storage.enqueue(a_task(n))) for n in range(CALLERS)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)

        assert answers[1::2] == [f"t{number}" for number in range(1, CALLERS, 2)]
        # A later call is not held up either.
        assert await storage.enqueue(a_task(CALLERS)) == f"t{CALLERS}"


async def test_a_repeated_call_is_recognized_by_its_nonce(url):
    async with open_storage(url) as storage:

        async def enqueue(number, nonce):
            return await storage.enqueue_many([a_task(number)], nonce=nonce)

        for _ in range(2):
            answers = await asyncio.gather(*(enqueue(n, f"n{n}") for n in range(CALLERS)))
            assert answers == [[f"t{number}"] for number in range(CALLERS)]

        with pytest.raises(DuplicateTask):
            await enqueue(1, "n2")


async def test_tasks_are_claimed_in_the_order_of_the_calls(url):
    async with open_storage(url) as storage:
        moment = datetime.now(UTC)
        await enqueue_together(storage, [a_task(n, eta=moment) for n in range(CALLERS)])

        claimed = await storage.reserve(CALLERS)

        assert [task.id for task in claimed] == [f"t{number}" for number in range(CALLERS)]
