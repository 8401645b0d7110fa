"""`ctx.transaction()`: what a task writes is committed with its success, exactly once."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from omniq import (
    AsyncTaskQueue,
    StorageClosed,
    StorageError,
    TaskFailed,
    TaskStatus,
)
from omniq.outcomes import Succeeded
from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.builders import a_result, a_task
from omniq.testing.faults import FaultyStorage
from tests.worker import transacting_tasks as tasks
from tests.worker.recorder import until


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
async def queue(path):
    async with AsyncTaskQueue(SQLiteStorage(path, settings=Settings(durability="os"))) as queue:
        with closing(sqlite3.connect(path)) as setup:
            setup.execute("CREATE TABLE notes (note TEXT)")
        yield queue


@pytest.fixture
def notes(path):
    def notes():
        with closing(sqlite3.connect(path)) as reader:
            return [note for (note,) in reader.execute("SELECT note FROM notes ORDER BY rowid")]

    return notes


@pytest.mark.parametrize("func", [tasks.write, tasks.write_in_thread])
async def test_the_row_and_the_result_are_stored_together(queue, notes, func):
    async with queue.worker(poll_interval=5) as pool:
        handle = await queue.enqueue(func, "a", {"n": 1})
        assert await handle.result(timeout=30) == {"n": 1}
        await until(lambda: pool.stats().completed_tasks == 1)

        assert notes() == ["a"]
        assert pool.stats().failed_tasks == 0
    assert await handle.status() is TaskStatus.SUCCESS


@pytest.mark.parametrize("func", [tasks.write, tasks.write_in_thread])
async def test_concurrent_transactions_all_commit(queue, notes, func):
    async with queue.worker(concurrency=20, poll_interval=5):
        handles = await queue.enqueue_many(func, [(f"{number:02}",) for number in range(40)])
        for handle in handles:
            await handle.result(timeout=30)

    assert sorted(notes()) == [f"{number:02}" for number in range(40)]


async def test_a_transaction_without_a_result_stores_none_and_not_the_returned_value(queue, notes):
    async with queue.worker(poll_interval=5):
        handle = await queue.enqueue(tasks.write, "a")

        assert await handle.result(timeout=30) is None


async def test_an_exception_inside_the_transaction_rolls_back_both(queue, notes):
    async with queue.worker(poll_interval=5):
        handle = await queue.enqueue(tasks.write_and_raise, "a", "inside")
        with pytest.raises(TaskFailed, match="inside the block"):
            await handle.result(timeout=30)

    assert notes() == []


async def test_an_exception_after_the_commit_does_not_change_the_outcome(queue, notes, recorder):
    async with queue.worker(poll_interval=5) as pool:
        handle = await queue.enqueue(tasks.write_and_raise, "a", "after")
        await handle.result(timeout=30)
        await until(lambda: pool.stats().completed_tasks == 1)

        assert pool.stats().failed_tasks == 0
    assert (notes(), recorder.names()) == (["a"], ["a"])
    assert await queue.dead.list() == []


@pytest.mark.parametrize("func", [tasks.write_and_hang, tasks.write_and_hang_in_thread])
@pytest.mark.parametrize("end", ["timeout", "cancel", "stop"])
async def test_the_end_of_a_run_after_the_commit_does_not_change_its_outcome(
    queue, notes, recorder, func, end
):
    options = {"timeout": 0.3} if end == "timeout" else {}
    pool = queue.worker(poll_interval=5)
    await pool.start()
    handle = await queue.options(**options).enqueue(func, "a")
    await until(lambda: recorder.names() == ["a"])
    if end == "cancel":
        assert not await handle.cancel()
    if end == "timeout":
        await until(lambda: pool.stats().completed_tasks == 1)
    await pool.stop(timeout=30, cancel_in_flight=True)

    assert notes() == ["a"]
    assert pool.stats().completed_tasks == 1
    assert pool.stats().failed_tasks == 0
    assert await handle.status() is TaskStatus.SUCCESS
    assert await queue.history(handle.id) == []


async def test_a_run_that_times_out_inside_the_block_has_written_nothing(queue, notes, recorder):
    async with queue.worker(poll_interval=5):
        handle = await queue.options(timeout=0.2, max_retries=0).enqueue(tasks.hang_inside, "a")
        with pytest.raises(TaskFailed, match="stopped after"):
            await handle.result(timeout=30)

    assert notes() == []


async def test_a_repeating_task_gets_its_next_run(queue, notes):
    async with queue.worker(poll_interval=5):
        handle = await queue.options(interval=0.05).enqueue(tasks.write, "tick", 7)
        await until(lambda: len(notes()) >= 3)
        await handle.cancel()

    assert set(notes()) == {"tick"}
    assert await queue.dead.list() == []


async def test_a_repeating_task_that_does_not_return_still_runs_again(queue, notes, recorder):
    async with queue.worker(concurrency=2, poll_interval=5) as pool:
        handle = await queue.options(interval=0.05).enqueue(tasks.write_and_hang, "tick")
        await until(lambda: len(notes()) >= 3)
        await handle.cancel()
        assert pool.stats().active_workers <= 2
        await pool.stop(timeout=30, cancel_in_flight=True)

        assert pool.stats().completed_tasks == len(notes())


async def test_a_transaction_may_follow_one_that_was_rolled_back(queue, notes):
    async with queue.worker(poll_interval=5):
        await (await queue.enqueue(tasks.fail_then_write, "a")).result(timeout=30)

    assert notes() == ["a"]


async def test_a_second_block_after_the_commit_is_refused(queue, notes, recorder):
    async with queue.worker(poll_interval=5) as pool:
        handle = await queue.enqueue(tasks.write_twice, "a")
        await handle.result(timeout=30)
        await until(lambda: pool.stats().completed_tasks == 1)

    assert notes() == ["a"]
    assert "the task is complete" in recorder.facts["second"]


async def test_the_next_task_can_be_enqueued_in_the_same_transaction(queue, notes, path):
    async with queue.worker(poll_interval=5):
        handle = await queue.enqueue(tasks.hand_on, str(path), "a")
        await queue.handle(await handle.result(timeout=30)).result(timeout=30)

    assert notes() == ["a", "a too"]


async def test_a_row_factory_set_by_the_task_does_not_affect_the_storage(queue, notes):
    async with queue.worker(poll_interval=5):
        handle = await queue.enqueue(tasks.write_with_odd_rows, "a")

        assert await handle.result(timeout=30) == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("with", r"use `async with ctx\.transaction"),
        ("commit", "do neither inside"),
        ("commit in SQL", "do neither inside"),
        ("own block", "do neither inside"),
        ("script", "do neither inside"),
        ("close", "closed database"),
        ("nested", "one at a time"),
        ("step", r"inside ctx\.transaction"),
        ("unserialisable", "object"),
    ],
)
async def test_misuse_raises_an_error_and_writes_nothing(queue, notes, how, message):
    async with queue.worker(poll_interval=5):
        handle = await queue.options(max_retries=0).enqueue(tasks.misuse, how)
        with pytest.raises(TaskFailed, match=message):
            await handle.result(timeout=30)

    assert notes() == []


async def test_a_result_that_cannot_be_stored_is_not_retried(queue, notes):
    async with queue.worker(poll_interval=5):
        handle = await queue.options(max_retries=5).enqueue(tasks.misuse, "unserialisable")
        with pytest.raises(TaskFailed):
            await handle.result(timeout=30)


async def test_a_transaction_in_a_process_task_raises_an_error_that_names_the_alternatives(
    queue, notes
):
    async with queue.worker(poll_interval=5):
        handle = await queue.options(max_retries=0).enqueue(tasks.write_in_process, "a")
        with pytest.raises(TaskFailed, match="the worker's own process"):
            await handle.result(timeout=30)

    assert notes() == []


async def test_an_async_task_on_another_event_loop_uses_the_blocking_transaction(queue, notes):
    async with queue.worker(poll_interval=5):
        own = tasks.write_on_a_loop_of_its_own
        handle = await queue.options(max_retries=0).enqueue(own, "a", True)
        with pytest.raises(TaskFailed, match=r"use `with ctx\.transaction"):
            await handle.result(timeout=30)
        await (await queue.enqueue(own, "b", False)).result(timeout=30)

    assert notes() == ["b"]


@pytest.mark.parametrize("backend", ["memory", "file"])
async def test_a_backend_without_transactions_raises_an_error(tmp_path, backend):
    storage = MemoryStorage() if backend == "memory" else FileStorage(tmp_path / "store")
    async with AsyncTaskQueue(storage) as queue, queue.worker(poll_interval=5):
        handle = await queue.options(max_retries=0).enqueue(tasks.write, "a")
        with pytest.raises(TaskFailed, match=f"the {backend} storage has no transactions"):
            await handle.result(timeout=30)


# The write lock


@pytest.mark.parametrize("func", [tasks.query_for_ever, tasks.hold_too_long])
async def test_a_transaction_is_ended_after_a_third_of_the_lease(queue, notes, recorder, func):
    async with queue.worker(poll_interval=5, lease=1.8):
        handle = await queue.options(max_retries=0).enqueue(func, "a")
        with pytest.raises(TaskFailed, match=r"held for more than 0\.6 s") as failed:
            await handle.result(timeout=30)

    assert failed.value.error is not None
    assert failed.value.error.error_type == "StorageError"
    assert notes() == []
    if func is tasks.hold_too_long:
        assert recorder.facts["then"] == "StorageError"


async def test_a_connection_in_use_at_the_end_of_its_time_is_reclaimed(queue, notes):
    storage = queue.storage
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await storage.renew(lease=0.06)

    def write_until_refused(connection):
        while True:
            connection.execute(tasks.INSERT, ("one",))
            connection.executemany(tasks.INSERT, (("many",) for _ in range(50)))
            # Not read to the end, and kept alive by the exception that ends this.
            rows = connection.execute("SELECT * FROM notes")
            rows.fetchmany(5)

    async def hold():
        success = Succeeded("a", 1, a_result(task))
        async with storage.transaction("a", 1, lambda: success, blocking=True) as connection:
            await asyncio.to_thread(write_until_refused, connection)

    for _ in range(20):
        with pytest.raises(StorageError, match="held for more than"):
            await hold()

    assert notes() == []


async def test_other_writers_wait_for_an_open_transaction_and_the_lease_is_renewed(
    queue, notes, recorder
):
    async with queue.worker(poll_interval=5), queue.storage.sibling() as heartbeat:
        handle = await queue.enqueue(tasks.hang_inside, "a")
        await until(lambda: recorder.names() == ["a"])
        waiting = asyncio.create_task(queue.enqueue(tasks.write, "b"))
        async with asyncio.timeout(30):
            assert (await heartbeat.renew()).held == {handle.id: 1}
        assert not waiting.done()
        recorder.gate("a").set()
        await handle.result(timeout=30)
        await (await waiting).result(timeout=30)

    assert notes() == ["a", "b"]


async def test_closing_the_storage_rolls_back_open_transactions(path, notes, queue):
    other = SQLiteStorage(path)
    await other.open()
    await other.enqueue(a_task("a"))
    (task,) = await other.reserve(1)
    success = Succeeded("a", 1, a_result(task))
    transaction = other.transaction("a", 1, lambda: success)
    connection = await transaction.__aenter__()
    connection.execute(tasks.INSERT, ("a",))
    behind = asyncio.create_task(other.transaction("a", 1, lambda: success).__aenter__())
    await asyncio.sleep(0)
    await other.close()
    with pytest.raises(StorageClosed):
        await behind
    with pytest.raises(StorageClosed, match="closed in a transaction"):
        await transaction.__aexit__(None, None, None)

    assert notes() == []
    assert await queue.handle("a").status() is TaskStatus.PENDING


async def test_a_reply_that_is_lost_after_the_commit_does_not_run_the_task_again(path, recorder):
    faulty = FaultyStorage(SQLiteStorage(path, settings=Settings(durability="os")))
    async with AsyncTaskQueue(faulty) as queue:
        with closing(sqlite3.connect(path)) as setup:
            setup.execute("CREATE TABLE notes (note TEXT)")
        faulty.fail("record", when="after")
        async with queue.worker(poll_interval=5) as pool:
            handle = await queue.enqueue(tasks.write, "a")
            await handle.result(timeout=30)
            await pool.run_until_empty()

        assert await handle.status() is TaskStatus.SUCCESS
        with closing(sqlite3.connect(path)) as reader:
            assert reader.execute("SELECT count(*) FROM notes").fetchone() == (1,)
