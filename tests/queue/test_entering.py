"""Several users of one queue: the first who enters it opens it, and the last who leaves it closes it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from omniq import AsyncTaskQueue, StorageClosed, StorageError, TaskQueue, task
from omniq.errors import StorageRefused


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


async def test_a_handler_that_enters_while_the_last_one_leaves_has_an_open_queue(
    url, monkeypatch: pytest.MonkeyPatch
):
    queue = AsyncTaskQueue(url)
    close, is_closing = queue.close, asyncio.Event()

    async def close_slowly() -> None:
        is_closing.set()
        await asyncio.sleep(0.05)
        await close()

    monkeypatch.setattr(queue, "close", close_slowly)

    async def enter_late() -> None:
        await is_closing.wait()
        async with queue:
            await asyncio.sleep(0.1)
            await queue.enqueue(add, 1, 2)

    late = asyncio.create_task(enter_late())
    async with queue:
        pass
    await late


async def test_a_handler_that_is_cancelled_while_it_leaves_does_not_keep_the_queue_open(url):
    queue = AsyncTaskQueue(url)
    async with queue:
        leaving = asyncio.create_task(queue.__aenter__())
        await leaving
        async with queue._entering:
            other = asyncio.create_task(queue.__aexit__(None, None, None))
            await asyncio.sleep(0)
            other.cancel()
            await asyncio.wait([other])

    assert not queue.storage.is_open


def test_a_queue_whose_opening_failed_in_one_event_loop_is_entered_in_another(tmp_path):
    (tmp_path / "folder").write_text("a file is in the way")
    queue = AsyncTaskQueue(f"sqlite:///{tmp_path}/folder/tasks.db")

    async def enter() -> None:
        async with queue:
            await queue.enqueue(add, 1, 2)

    async def enter_together() -> list[BaseException | None]:
        return await asyncio.gather(*(enter() for _ in range(3)), return_exceptions=True)

    assert {type(each) for each in asyncio.run(enter_together())} <= {StorageError, StorageRefused}
    (tmp_path / "folder").unlink()
    assert asyncio.run(enter_together()) == [None] * 3


async def test_a_queue_that_was_opened_stays_open_until_it_is_closed(url):
    queue = AsyncTaskQueue(url)
    await queue.open()
    owner = queue.storage.owner
    async with queue:
        assert queue.storage.owner == owner
    await queue.enqueue(add, 1, 2)
    await queue.close()

    assert not queue.storage.is_open


def test_a_blocking_queue_that_was_opened_stays_open_until_it_is_closed(url):
    queue = TaskQueue(url)
    queue.open()
    with queue:
        queue.enqueue(add, 1, 2)
    assert queue.enqueue(add, 1, 2).id
    queue.close()

    with pytest.raises(StorageClosed):
        queue.stats()
