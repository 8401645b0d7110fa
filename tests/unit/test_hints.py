"""A hint wakes whoever listens for its topic, from any thread, and leaves nothing behind."""

from __future__ import annotations

import asyncio

from omniq.storage.wakeups import Hints


async def test_work_wakes_everybody_who_waits_for_work():
    hints = Hints()
    with hints.listen_for_work() as first, hints.listen_for_work() as second:
        hints.work()
        await asyncio.wait_for(asyncio.gather(first, second), 5)

    assert hints._waiting == {}


async def test_a_result_wakes_only_those_who_wait_for_it():
    hints = Hints()
    with (
        hints.listen_for_result("a") as a,
        hints.listen_for_result("b") as b,
        hints.listen_for_work() as work,
    ):
        hints.results(["a", "c"])
        await asyncio.wait_for(a, 5)

        assert not b.done()
        assert not work.done()


async def test_a_hint_from_another_thread_arrives():
    hints = Hints()
    with hints.listen_for_work() as work:
        await asyncio.to_thread(hints.work)
        await asyncio.wait_for(work, 5)


async def test_a_hint_before_anybody_listens_is_not_kept():
    hints = Hints()
    hints.work()
    hints.results(["a"])
    with hints.listen_for_work() as work, hints.listen_for_result("a") as result:
        await asyncio.sleep(0)

        assert not work.done()
        assert not result.done()


async def test_a_listener_that_gives_up_leaves_nothing_behind():
    hints = Hints()
    with hints.listen_for_work() as work, hints.listen_for_result("a"):
        work.cancel()
        hints.work()
        await asyncio.sleep(0)

    assert hints._waiting == {}


def test_a_hint_for_a_loop_that_was_closed_is_dropped():
    hints = Hints()

    async def listen_for_ever():
        hints.listen_for_work().__enter__()

    asyncio.run(listen_for_ever())
    hints.work()


def test_a_cancellation_is_told_to_those_who_asked_until_they_stop():
    hints = Hints()
    first: list[str] = []
    second: list[str] = []
    forget = hints.on_cancel(first.append)
    hints.on_cancel(second.append)
    hints.cancelled("a")
    forget()
    forget()
    hints.cancelled("b")

    assert (first, second) == (["a"], ["a", "b"])
