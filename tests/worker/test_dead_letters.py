"""Dead letters: every permanent failure is stored completely, and can be retried."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    DuplicateTask,
    InvalidValue,
    QueueFull,
    Task,
    TaskQueue,
    TaskStatus,
)
from omniq.errors import SerializationError
from omniq.serialization import MsgspecSerializer
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from tests.worker import guarded_tasks
from tests.worker.conftest import Store

GRAVES: dict[str, tuple[Any, tuple[Any, ...], int, str]] = {
    "exhausted": (guarded_tasks.fail, ("boom",), 2, "ValueError: boom"),
    "permanent": (guarded_tasks.refuse, (), 1, "PermanentError: never"),
    "unserialisable": (guarded_tasks.unwritable, (), 1, "SerializationError"),
}


async def bury(queue: AsyncTaskQueue, func=guarded_tasks.fail, *args: object, **options) -> str:
    """The id of a task that has failed permanently."""
    chosen = {"max_retries": 0, **options}
    handle = await queue.options(**chosen).enqueue(func, *args)
    await queue.worker().run_until_empty()
    assert await queue.dead.get(handle.id) is not None
    return handle.id


@pytest.mark.parametrize("name", ["takes_an_order", "takes_an_order_in_process"])
async def test_arguments_that_do_not_fit_are_a_dead_letter_without_frames_of_omniq(
    memory_queue, name
):
    path = f"{guarded_tasks.__name__}.{name}"
    task_id = await bury(memory_queue, path, {"number": "x"}, max_retries=3)

    letter = await memory_queue.dead.get(task_id)
    assert (letter.failure_reason, letter.attempt_count) == ("permanent", 1)
    assert letter.error_details.startswith(f"SerializationError: {path}: order.number: ")
    assert "Traceback" not in letter.error_details


@pytest.mark.parametrize("reason", GRAVES)
async def test_every_permanent_failure_ends_as_a_dead_letter_with_all_details(queue, reason):
    func, args, runs, error = GRAVES[reason]
    handle = await queue.options(max_retries=1, queue="graves").enqueue(func, *args)
    await queue.worker(base_retry_delay=0).run_until_empty()
    letter = await queue.dead.get(handle.id)
    attempts = await queue.dead.attempts(handle.id)

    path = func if isinstance(func, str) else f"{func.__module__}.{func.__qualname__}"
    assert (letter.task_id, letter.func_path, letter.queue) == (handle.id, path, "graves")
    assert (letter.failure_reason, letter.attempt_count) == (reason, runs)
    assert error in letter.error_details
    assert [attempt.number for attempt in attempts] == list(range(1, runs + 1))
    assert all(error in attempt.error.traceback for attempt in attempts)
    assert (letter.first_failure, letter.last_failure) == (
        attempts[0].finished_at,
        attempts[-1].finished_at,
    )
    assert await queue.dead.list(func_path=path, reason=reason) == [letter]


async def test_dead_letters_are_complete_when_their_results_have_expired(queue):
    task_id = await bury(queue, guarded_tasks.fail, "boom", result_ttl=0)

    assert await queue.get_task(task_id) is None
    assert (await queue.dead.get_task(task_id)).args == ("boom",)
    (attempt,) = await queue.history(task_id)
    assert "ValueError: boom" in attempt.error.traceback
    assert await queue.dead.retry(task_id)


async def test_a_dead_letter_is_retried_under_its_id_with_other_arguments(queue):
    task_id = await bury(queue, guarded_tasks.add, "x")
    assert await queue.dead.retry(task_id, args=[4], kwargs={"b": 1})
    await queue.worker().run_until_empty()

    assert await queue.handle(task_id).result(30) == 5
    assert await queue.dead.list() == []
    assert not await queue.dead.retry(task_id)


async def test_a_retry_that_fails_leaves_the_dead_letter(store: Store):
    async with store.another() as storage:
        queue = AsyncTaskQueue(storage)
        task_id = await bury(queue, guarded_tasks.fail, "boom", unique="key")
        letter = await queue.dead.get(task_id)
        holder = await queue.options(unique="key").enqueue(guarded_tasks.add, 1)
        with pytest.raises(DuplicateTask):
            await queue.dead.retry(task_id)
        assert await queue.dead.retry_all() == 0
        with pytest.raises(SerializationError):
            await queue.dead.retry(task_id, args=[object()])

        assert await queue.dead.get(task_id) == letter
        await holder.cancel()
        assert await queue.dead.retry(task_id)


async def test_a_full_queue_leaves_the_dead_letters_it_has_no_room_for():
    memory = MemoryStorage()
    async with memory.another(max_pending=2) as storage:
        queue = AsyncTaskQueue(storage)
        for _ in range(3):
            await bury(queue, guarded_tasks.fail, "boom")
        with pytest.raises(QueueFull):
            await queue.dead.retry_all()

        assert ((await queue.stats()).dead, await storage.count_waiting()) == (1, 2)


async def test_dead_letters_are_listed_and_retried_by_type_reason_and_time():
    clock = ManualClock()
    async with AsyncTaskQueue(MemoryStorage(clock=clock)) as queue:
        old = await bury(queue, guarded_tasks.fail, "old")
        clock.advance(3600)
        new = await bury(queue, guarded_tasks.fail, "new")
        other = await bury(queue, guarded_tasks.refuse)

        async def ids(**filters) -> list[str]:
            return [letter.task_id for letter in await queue.dead.list(**filters)]

        assert await ids(since=60) == [new, other]
        assert await ids(until=timedelta(minutes=1)) == [old]
        assert await ids(since=clock.now(), reason="permanent") == [other]
        assert await ids(limit=1, since=60) == [new]
        with pytest.raises(InvalidValue):
            await ids(since=-1)
        assert await queue.dead.retry_all(since=60, reason="exhausted") == 1
        assert await ids() == [old, other]
        assert await queue.dead.purge(older_than=60) == 1
        assert await queue.dead.delete(other)
        assert await ids() == []


async def test_an_export_is_json_and_has_the_call_and_every_attempt(queue):
    odd = {"when": timedelta(seconds=3), "raw": b"\x00\xff", "none": None, "deep": {1: (2.5, {3})}}
    task_id = await bury(queue, guarded_tasks.fail, "boom", metadata={"tenant": "a"})
    other = await bury(queue, guarded_tasks.add, odd, float("nan"))
    records = [record async for record in queue.dead.export()]
    lines = [json.dumps(record, allow_nan=False) for record in records]

    first, second = map(json.loads, lines)
    assert [first["task_id"], second["task_id"]] == [task_id, other]
    assert (first["args"], first["metadata"]) == (["boom"], {"tenant": "a"})
    assert (first["failure_reason"], first["attempts"][0]["outcome"]) == ("exhausted", "failed")
    assert "ValueError: boom" in first["attempts"][0]["error"]["traceback"]
    assert second["args"][0]["raw"] == "AP8="
    assert second["args"][0]["deep"] == {"1": [2.5, [3]]}
    assert [record async for record in queue.dead.export(reason="permanent")] == []


async def test_an_export_of_many_dead_letters_reads_page_by_page(memory_queue, monkeypatch):
    monkeypatch.setattr("omniq.queue.dead_letters._PAGE", 3)
    for _ in range(8):
        await bury(memory_queue, guarded_tasks.fail, "boom")

    exported = [record["task_id"] async for record in memory_queue.dead.export()]
    assert exported == [letter.task_id for letter in await memory_queue.dead.list()]
    assert len(exported) == 8


class _Torn(MsgspecSerializer):
    """Cannot decode what other serializers encoded."""

    def decode_task(self, data: bytes) -> Task:
        raise SerializationError("torn")


async def test_a_task_that_cannot_be_decoded_is_a_dead_letter_that_can_still_be_inspected():
    memory = MemoryStorage()
    async with memory, memory.another(serializer=_Torn()) as torn:
        handle = await AsyncTaskQueue(memory).enqueue(guarded_tasks.add, 1)
        queue = AsyncTaskQueue(torn)
        await queue.worker().run_until_empty()
        (letter,) = await queue.dead.list()
        (record,) = [record async for record in queue.dead.export()]

        assert (letter.failure_reason, letter.attempt_count) == ("undecodable", 1)
        assert record["args"] == []
        assert await AsyncTaskQueue(memory).dead.retry(handle.id)


def test_the_blocking_api_has_every_operation(tmp_path):
    with TaskQueue(f"sqlite:///{tmp_path}/q.db?durability=os") as queue:
        handle = queue.options(max_retries=0).enqueue(guarded_tasks.fail, "boom")
        queue.worker().run_until_empty()
        (letter,) = queue.dead.list(since=60, reason="exhausted")

        assert queue.dead.get(handle.id) == letter
        task = queue.dead.get_task(handle.id)
        assert task is not None
        assert task.args == ("boom",)
        assert [attempt.number for attempt in queue.dead.attempts(handle.id)] == [1]
        assert queue.history(handle.id) == queue.dead.attempts(handle.id)
        assert [record["task_id"] for record in queue.dead.export()] == [handle.id]
        assert queue.dead.retry_all(until=0) == 1
        assert handle.status() is TaskStatus.PENDING
