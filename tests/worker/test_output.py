"""The output of tasks: complete and in order for its readers, wherever the task runs, and cheap for the worker."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from omniq import AsyncTaskQueue, Settings, TaskCancelled, TaskNotFound, TaskQueue
from omniq.errors import ResultTimeout
from omniq.storage.memory import MemoryStorage
from omniq.testing.faults import FaultyStorage
from tests.worker import output_tasks as tasks
from tests.worker.output_tasks import SPOKEN
from tests.worker.recorder import RECORDER

pytestmark = pytest.mark.timeout(60)

EVERYWHERE = pytest.mark.parametrize("talks", tasks.PLACES, ids=lambda func: func.__name__)


class CountingStorage(MemoryStorage):
    """Counts the writes of output and the chunks in them."""

    writes = chunks = 0

    async def append_output(self, batches: Any) -> list[bool]:
        self.writes += 1
        self.chunks += sum(len(batch.chunks) for batch in batches)
        return await super().append_output(batches)


async def _all(handle: Any, **options: Any) -> list[Any]:
    return [chunk async for chunk in handle.stream(**options)]


@EVERYWHERE
async def test_a_reader_gets_everything_that_a_task_streams_and_then_the_end(memory_queue, talks):
    handle = await memory_queue.enqueue(talks)
    async with memory_queue.worker():
        chunks = await _all(handle)

        assert await handle.result(timeout=20) == "said"
    assert [chunk.value for chunk in chunks] == SPOKEN
    assert [chunk.number for chunk in chunks] == [2, 3, 4]
    assert [chunk.is_first for chunk in chunks] == [True, False, False]
    assert {(chunk.attempt, chunk.run, chunk.missed) for chunk in chunks} == {(1, 1, 0)}
    (line, *_) = await _all(handle, logs=True)
    assert (line.value, line.level, line.fields) == ("begins", "debug", {"size": 3})


async def test_output_is_there_when_the_task_has_ended_on_every_storage(queue):
    handle = await queue.enqueue(tasks.talks)
    async with queue.worker():
        await handle.result(timeout=20)

        assert [chunk.value for chunk in await _all(handle)] == SPOKEN


async def test_another_process_reads_while_the_task_runs(store):
    async with AsyncTaskQueue(store.another()) as queue, AsyncTaskQueue(store.another()) as other:
        handle = await queue.enqueue(tasks.says_and_waits, "now")
        reader = other.handle(handle.id).stream()
        async with queue.worker():
            assert (await anext(reader)).value == "now"
            RECORDER.gate("go on").set()
            assert [chunk.value async for chunk in reader] == ["end"]


def test_blocking_code_reads_the_same(tmp_path):
    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db") as queue:
        handle = queue.enqueue(tasks.talks)
        with queue.worker():
            chunks = list(handle.stream())

    assert [chunk.value for chunk in chunks] == SPOKEN


async def test_a_run_that_is_repeated_has_its_own_output(memory_queue):
    handle = await memory_queue.enqueue(tasks.fails_first)
    async with memory_queue.worker(base_retry_delay=0.001, poll_interval=0.05):
        await handle.result(timeout=20)
        newest, everything = await _all(handle), await _all(handle, all_runs=True)

    assert [(chunk.value, chunk.attempt, chunk.is_first) for chunk in newest] == [
        ("a2", 2, True),
        ("b2", 2, False),
    ]
    assert [(chunk.value, chunk.is_first) for chunk in everything] == [
        ("a1", True),
        ("b1", False),
        ("a2", True),
        ("b2", False),
    ]


async def test_a_reader_goes_on_with_the_next_run_and_sees_where_it_begins(memory_queue):
    handle = await memory_queue.enqueue(tasks.fails_first)
    reader, seen = handle.stream(), list[Any]()
    async with memory_queue.worker(base_retry_delay=0.3, poll_interval=0.05):
        async for chunk in reader:
            seen.append((chunk.value, chunk.attempt, chunk.is_first))

    assert seen[-2:] == [("a2", 2, True), ("b2", 2, False)]
    assert seen[:-2] in ([], [("a1", 1, True), ("b1", 1, False)])


async def test_a_task_without_output_writes_none_and_a_thousand_chunks_take_few_writes():
    storage = CountingStorage()
    async with AsyncTaskQueue(storage) as queue:
        quiet = await queue.enqueue("tests.worker.sample_tasks.add", 1, 2)
        async with queue.worker():
            await quiet.result(timeout=20)
            assert storage.writes == 0
            handle = await queue.enqueue(tasks.floods, 1_000)
            values = [chunk.value for chunk in await _all(handle)]

    assert values == list(range(1, 1_001))
    assert storage.chunks == 1_000
    assert storage.writes <= 10


async def test_runs_that_end_together_share_writes():
    storage = CountingStorage()
    async with AsyncTaskQueue(storage) as queue:
        handles = [await queue.enqueue(tasks.talks) for _ in range(20)]
        async with queue.worker(concurrency=20):
            for handle in handles:
                await handle.result(timeout=20)

    assert storage.chunks == 80
    assert storage.writes <= 10


@pytest.mark.parametrize("floods", [tasks.floods, tasks.floods_in_thread, tasks.floods_in_process])
async def test_a_stream_over_its_bound_drops_the_oldest_and_says_how_many(floods):
    settings = Settings(max_output_chunks=100)
    async with AsyncTaskQueue(MemoryStorage(settings=settings)) as queue:
        handle = await queue.enqueue(floods, 5_000)
        async with queue.worker():
            await handle.result(timeout=20)
        chunks = await _all(handle)

    assert [chunk.value for chunk in chunks] == list(range(5_001 - len(chunks), 5_001))
    assert 80 <= len(chunks) <= 100
    assert chunks[0].missed == 5_000 - len(chunks)
    assert all(chunk.missed == 0 for chunk in chunks[1:])


@pytest.mark.parametrize("floods", [tasks.floods, tasks.floods_in_thread, tasks.floods_in_process])
async def test_while_output_cannot_be_stored_a_task_goes_on_and_the_newest_is_kept(floods):
    settings = Settings(max_output_chunks=4_000)
    faulty = FaultyStorage(MemoryStorage(settings=settings))
    faulty.fail("output", times=3)
    async with AsyncTaskQueue(faulty) as queue:
        handle = await queue.enqueue(floods, 20_000)
        async with queue.worker():
            await handle.result(timeout=30)
        chunks = await _all(handle)

    assert chunks[-1].value == 20_000
    assert sum(1 + chunk.missed for chunk in chunks) == 20_000


async def test_output_whose_reply_was_lost_is_there_once():
    faulty = FaultyStorage(MemoryStorage())
    faulty.fail("output", when="after")
    async with AsyncTaskQueue(faulty) as queue:
        handle = await queue.enqueue(tasks.talks)
        async with queue.worker():
            await handle.result(timeout=20)
        assert [chunk.value for chunk in await _all(handle)] == SPOKEN


async def test_a_worker_that_has_lost_its_task_adds_nothing_to_its_output(memory_queue):
    storage = memory_queue.storage
    handle = await memory_queue.enqueue(tasks.says_and_waits, "now")
    async with memory_queue.worker() as pool:
        reader = handle.stream()
        await anext(reader)
        task = await memory_queue.get_task(handle.id)
        pool_owner = task.owner
        await storage._engine.retire(pool_owner)
        other = storage.another()
        async with other:
            again = (await other.reserve(1))[0]
            RECORDER.gate("go on").set()
            await pool.stop()
            page = await other.read_output(handle.id, all_runs=True)

    assert again.token == task.token + 1
    assert [chunk.value for chunk in page.chunks] == ["now"]


async def test_bad_chunks_are_refused_where_the_task_makes_them(memory_queue):
    handle = await memory_queue.enqueue(tasks.says_what_is_refused)
    async with memory_queue.worker():
        refused = await handle.result(timeout=20)

    assert [each.partition(":")[0] for each in refused] == [
        *["InvalidTask"] * 5,
        *["OutputTooLarge"] * 2,
        *["InvalidTask"] * 2,
    ]
    assert "chunk: the key 1 is not text" in refused[0]
    assert "chunk[0]['at']: complex is not text" in refused[2]
    (line,) = await _all(handle, logs=True)
    assert (line.value, line.level) == ("file \\udcff", "info")


async def test_output_before_a_transaction_is_stored_and_after_it_is_not(tmp_path):
    async with AsyncTaskQueue(f"sqlite:///{tmp_path}/tasks.db") as queue:
        handle = await queue.enqueue(tasks.says_in_transaction)
        async with queue.worker():
            await handle.result(timeout=20)
        assert [chunk.value for chunk in await _all(handle)] == ["before"]


async def test_what_a_task_says_while_it_is_cancelled_is_stored(memory_queue):
    handle = await memory_queue.enqueue(tasks.says_while_it_is_stopped)
    async with memory_queue.worker():
        reader = handle.stream(logs=True)
        await anext(reader)
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=20)

        assert [chunk.value async for chunk in reader] == ["stopped"]


async def test_a_thread_that_a_task_has_left_does_not_speak_for_the_next_one(
    memory_queue, tmp_path
):
    async with memory_queue.worker(concurrency=1):
        first = await memory_queue.enqueue(tasks.leaves_a_thread, str(tmp_path))
        await first.result(timeout=20)
        second = await memory_queue.enqueue(tasks.talks_in_process)
        await second.result(timeout=20)
        (tmp_path / "enough").touch()

        assert [chunk.value for chunk in await _all(second)] == SPOKEN


@pytest.mark.parametrize("follows", [tasks.follows, tasks.follows_in_thread])
async def test_a_task_follows_one_that_it_has_enqueued(memory_queue, follows):
    handle = await memory_queue.enqueue(follows)
    async with memory_queue.worker():
        assert await handle.result(timeout=20) == SPOKEN


async def test_a_reader_of_an_unknown_or_silent_task_gets_an_error(memory_queue):
    handle = await memory_queue.enqueue(tasks.talks)

    with pytest.raises(TaskNotFound):
        await _all(memory_queue.handle("unknown"))
    with pytest.raises(ResultTimeout):
        await _all(handle, timeout=0.01)


async def test_output_after_the_end_of_the_worker_is_dropped(memory_queue):
    handle = await memory_queue.enqueue(tasks.talks_in_thread)
    async with memory_queue.worker() as pool:
        await handle.result(timeout=20)
        writer = pool._runtime.parts.running.outputs
        task = await memory_queue.get_task(handle.id)
    late = threading.Thread(target=writer.add, args=(task, b"\x91\x01"))
    late.start()
    await asyncio.to_thread(late.join)

    assert [chunk.value for chunk in await _all(handle)] == SPOKEN
