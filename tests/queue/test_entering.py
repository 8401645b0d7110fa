"""Several users of one queue: the first who enters it opens it, and the last who leaves it closes it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from omniq import AsyncTaskQueue, StorageClosed, TaskQueue, task


@task
async def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(params=["memory://", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "memory://":
        return "memory://"
    return f"{request.param}:///{tmp_path}/{'tasks.db' if request.param == 'sqlite' else 'tasks'}"


async def test_handlers_that_enter_one_queue_do_not_close_it_for_each_other(url):
    queue = AsyncTaskQueue(url)

    async def handle(number: int) -> str:
        async with queue:
            await asyncio.sleep(number % 3 / 100)
            return (await queue.enqueue(add, number, 1)).id

    ids = await asyncio.gather(*map(handle, range(20)))

    assert not queue.storage.is_open
    if url != "memory://":
        async with queue:
            assert {task.id for task in await queue.list_tasks()} == set(ids)


async def test_a_queue_that_is_entered_again_stays_the_same_worker(url):
    async with AsyncTaskQueue(url) as queue, queue.worker():
        owner = queue.storage.owner
        async with queue:
            assert queue.storage.owner == owner
        assert await (await queue.enqueue(add, 1, 2)).result(30) == 3


async def test_close_closes_a_queue_whatever_uses_it(url):
    queue = AsyncTaskQueue(url)
    async with queue:
        await queue.close()
        with pytest.raises(StorageClosed):
            await queue.stats()
        async with queue:
            await queue.stats()
        await queue.stats()

    assert not queue.storage.is_open


def test_threads_that_enter_one_queue_do_not_close_it_for_each_other(url):
    queue, ids, failed = TaskQueue(url), [], []
    barrier = threading.Barrier(8)

    def handle(number: int) -> None:
        try:
            with queue:
                # All have entered it before the first leaves.
                barrier.wait()
                for _ in range(number):
                    ids.append(queue.enqueue(add, number, 1).id)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=handle, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    assert len(set(ids)) == sum(range(8))
    assert not queue.storage.is_open
    with pytest.raises(StorageClosed, match="open a new one"), queue:
        pass


def test_one_event_loop_after_the_other_may_use_a_queue(url):
    queue = AsyncTaskQueue(url)

    async def use() -> None:
        async def enter() -> None:
            async with queue:
                await queue.enqueue(add, 1, 2)

        await asyncio.gather(*(enter() for _ in range(5)))

    for _ in range(3):
        asyncio.run(use())
