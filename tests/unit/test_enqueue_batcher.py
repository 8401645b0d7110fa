"""Concurrent enqueues become few writes, in the order of the calls, with one or two concurrent writes."""

from __future__ import annotations

import asyncio

import pytest

from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.row_rules import row_of
from omniq.testing.builders import a_task


def a_row(name):
    return row_of(a_task(name), b"", now=0, default_ttl=1_000_000, nonce="n")


class Store:
    """Records each write when it begins, and completes it when the test calls `reply`."""

    def __init__(self):
        self.writes = []
        self.replies = []

    async def write(self, rows):
        ids = [row.id for row in rows]
        reply = asyncio.get_running_loop().create_future()
        self.writes.append(ids)
        self.replies.append(reply)
        await reply
        return ids

    async def reply(self, number):
        self.replies[number].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


async def start_calls(batcher, names):
    """One call for each name, all of them waiting for their ids."""
    calls = [asyncio.create_task(batcher.add([a_row(name)])) for name in names]
    for _ in range(5):
        await asyncio.sleep(0)
    return calls


async def after_concurrent_calls(concurrent_writes):
    """A store and a batcher after three calls, two of which were written together."""
    store = Store()
    batcher = EnqueueBatcher(store.write, concurrent_writes=concurrent_writes)
    calls = await start_calls(batcher, "abc")
    await store.reply(0)
    await store.reply(1)
    await asyncio.gather(*calls)
    return store, batcher


async def test_calls_during_a_write_wait_and_are_written_together():
    store = Store()
    batcher = EnqueueBatcher(store.write)
    calls = await start_calls(batcher, "abcd")
    assert store.writes == [["a"]]

    await store.reply(0)
    assert store.writes == [["a"], ["b", "c", "d"]]

    await store.reply(1)
    assert await asyncio.gather(*calls) == [["a"], ["b"], ["c"], ["d"]]


async def test_with_two_concurrent_writes_a_second_begins_during_the_first_and_no_third():
    store = Store()
    batcher = EnqueueBatcher(store.write, concurrent_writes=2)
    calls = await start_calls(batcher, "abc")
    assert store.writes == [["a"], ["b", "c"]]

    calls += await start_calls(batcher, "de")
    assert store.writes == [["a"], ["b", "c"]]

    await store.reply(0)
    await store.reply(1)
    await store.reply(2)
    assert store.writes == [["a"], ["b", "c"], ["d", "e"]]
    assert await asyncio.gather(*calls) == [["a"], ["b"], ["c"], ["d"], ["e"]]


@pytest.mark.parametrize(("concurrent_writes", "shares"), [(1, ["defghi"]), (2, ["def", "ghi"])])
async def test_concurrent_calls_are_collected_and_shared_between_the_writes(
    concurrent_writes, shares
):
    store, batcher = await after_concurrent_calls(concurrent_writes)

    calls = await start_calls(batcher, "defghi")
    assert store.writes[2:] == [list(share) for share in shares]

    for number, _ in enumerate(shares, start=2):
        await store.reply(number)
    assert await asyncio.gather(*calls) == [[name] for name in "defghi"]


async def test_after_concurrent_calls_a_single_call_is_written_directly_again():
    store, batcher = await after_concurrent_calls(concurrent_writes=2)
    for number, name in enumerate("de", start=2):
        calls = await start_calls(batcher, name)
        await store.reply(number)
        await asyncio.gather(*calls)

    last = asyncio.create_task(batcher.add([a_row("f")]))
    await asyncio.sleep(0)
    assert store.writes[2:] == [["d"], ["e"], ["f"]]

    await store.reply(4)
    assert await last == ["f"]


async def test_cancelled_calls_do_not_prevent_others_from_being_written():
    store, batcher = await after_concurrent_calls(concurrent_writes=2)
    calls = [asyncio.create_task(batcher.add([a_row(name)])) for name in "defg"]
    await asyncio.sleep(0)
    for call in calls[:3]:
        call.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.writes[2:] == [["g"]]

    await store.reply(2)
    assert await calls[3] == ["g"]
    assert all(call.cancelled() for call in calls[:3])


def test_no_caller_waits_forever_when_the_event_loop_ends():
    async def leave():
        store = Store()
        batcher = EnqueueBatcher(store.write)
        calls = await start_calls(batcher, "abc")
        await store.reply(0)
        calls += await start_calls(batcher, "d")
        assert store.writes == [["a"], ["b", "c"]]
        return calls

    first, *others = asyncio.run(leave())
    assert first.result() == ["a"]
    assert all(call.cancelled() for call in others)


async def test_callers_are_cancelled_when_the_writer_task_is_cancelled():
    store = Store()
    batcher = EnqueueBatcher(store.write)
    before = asyncio.all_tasks()
    calls = await start_calls(batcher, "abc")
    await store.reply(0)
    calls += await start_calls(batcher, "d")
    (writer,) = asyncio.all_tasks() - before - set(calls)
    writer.cancel()

    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[0] == ["a"]
    assert [type(answer) for answer in answers[1:]] == [asyncio.CancelledError] * 3

    again = await start_calls(batcher, "e")
    await store.reply(2)
    assert await asyncio.gather(*again) == [["e"]]
