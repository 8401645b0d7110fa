"""How the calls of many become few writes, in the order they came, with one lane and with two."""

from __future__ import annotations

import asyncio

import pytest

from omniq.storage.enqueue_batcher import Enqueues
from omniq.storage.row_rules import row_of
from omniq.testing.builders import a_task


def a_row(name):
    return row_of(a_task(name), b"", now=0, default_ttl=1_000_000, nonce="n")


class Store:
    """Writes when it is told to, and in the order in which it was asked."""

    def __init__(self):
        self.asked = []
        self.replies = []

    async def write(self, rows):
        ids = [row.id for row in rows]
        reply = asyncio.get_running_loop().create_future()
        self.asked.append(ids)
        self.replies.append(reply)
        await reply
        return ids

    async def reply(self, number):
        self.replies[number].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


async def ask(enqueues, names):
    """Calls of that many callers, all on their way."""
    calls = [asyncio.create_task(enqueues.add([a_row(name)])) for name in names]
    for _ in range(5):
        await asyncio.sleep(0)
    return calls


async def after_a_crowd(lanes):
    """Three callers have been served, two of them together."""
    store = Store()
    enqueues = Enqueues(store.write, lanes=lanes)
    calls = await ask(enqueues, "abc")
    await store.reply(0)
    await store.reply(1)
    await asyncio.gather(*calls)
    return store, enqueues


async def test_with_one_lane_whoever_comes_later_waits_and_is_written_together():
    store = Store()
    enqueues = Enqueues(store.write)
    calls = await ask(enqueues, "abcd")
    assert store.asked == [["a"]]

    await store.reply(0)
    assert store.asked == [["a"], ["b", "c", "d"]]

    await store.reply(1)
    assert await asyncio.gather(*calls) == [["a"], ["b"], ["c"], ["d"]]


async def test_with_two_lanes_a_write_begins_while_another_is_under_way_and_no_third():
    store = Store()
    enqueues = Enqueues(store.write, lanes=2)
    calls = await ask(enqueues, "abc")
    assert store.asked == [["a"], ["b", "c"]]

    calls += await ask(enqueues, "de")
    assert store.asked == [["a"], ["b", "c"]]

    await store.reply(0)
    await store.reply(1)
    await store.reply(2)
    assert store.asked == [["a"], ["b", "c"], ["d", "e"]]
    assert await asyncio.gather(*calls) == [["a"], ["b"], ["c"], ["d"], ["e"]]


@pytest.mark.parametrize(("lanes", "shares"), [(1, ["defghi"]), (2, ["def", "ghi"])])
async def test_a_crowd_is_gathered_before_it_is_written_each_lane_with_its_share(lanes, shares):
    store, enqueues = await after_a_crowd(lanes)

    calls = await ask(enqueues, "defghi")
    assert store.asked[2:] == [list(share) for share in shares]

    for number, _ in enumerate(shares, start=2):
        await store.reply(number)
    assert await asyncio.gather(*calls) == [[name] for name in "defghi"]


async def test_after_a_crowd_a_single_caller_is_written_at_once_again():
    store, enqueues = await after_a_crowd(lanes=2)
    for number, name in enumerate("de", start=2):
        calls = await ask(enqueues, name)
        await store.reply(number)
        await asyncio.gather(*calls)

    last = asyncio.create_task(enqueues.add([a_row("f")]))
    await asyncio.sleep(0)
    assert store.asked[2:] == [["d"], ["e"], ["f"]]

    await store.reply(4)
    assert await last == ["f"]


async def test_callers_who_gave_up_keep_nobody_from_being_written():
    store, enqueues = await after_a_crowd(lanes=2)
    calls = [asyncio.create_task(enqueues.add([a_row(name)])) for name in "defg"]
    await asyncio.sleep(0)
    for call in calls[:3]:
        call.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.asked[2:] == [["g"]]

    await store.reply(2)
    assert await calls[3] == ["g"]
    assert all(call.cancelled() for call in calls[:3])


def test_at_the_end_of_the_event_loop_nobody_is_left_waiting():
    async def leave():
        store = Store()
        enqueues = Enqueues(store.write)
        calls = await ask(enqueues, "abc")
        await store.reply(0)
        calls += await ask(enqueues, "d")
        assert store.asked == [["a"], ["b", "c"]]
        return calls

    first, *others = asyncio.run(leave())
    assert first.result() == ["a"]
    assert all(call.cancelled() for call in others)


async def test_whoever_waits_hears_of_a_writer_that_was_cancelled():
    store = Store()
    enqueues = Enqueues(store.write)
    before = asyncio.all_tasks()
    calls = await ask(enqueues, "abc")
    await store.reply(0)
    calls += await ask(enqueues, "d")
    (writer,) = asyncio.all_tasks() - before - set(calls)
    writer.cancel()

    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[0] == ["a"]
    assert [type(answer) for answer in answers[1:]] == [asyncio.CancelledError] * 3

    again = await ask(enqueues, "e")
    await store.reply(2)
    assert await asyncio.gather(*again) == [["e"]]
