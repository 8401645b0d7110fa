"""A wake-up reaches every listener of its topic, from any thread, and leaves nothing behind."""

from __future__ import annotations

import asyncio

from omniq.storage.wakeups import LocalWakeups


async def test_notify_work_wakes_every_listener_for_work():
    wakeups = LocalWakeups()
    with wakeups.listen_for_work() as first, wakeups.listen_for_work() as second:
        wakeups.notify_work()
        await asyncio.wait_for(asyncio.gather(first, second), 30)

    assert wakeups._waiting == {}


async def test_notify_results_wakes_only_the_listeners_for_those_results():
    wakeups = LocalWakeups()
    with (
        wakeups.listen_for_result("a") as a,
        wakeups.listen_for_result("b") as b,
        wakeups.listen_for_work() as work,
    ):
        wakeups.notify_results(["a", "c"])
        await asyncio.wait_for(a, 30)

        assert not b.done()
        assert not work.done()


async def test_a_wakeup_from_another_thread_arrives():
    wakeups = LocalWakeups()
    with wakeups.listen_for_work() as work:
        await asyncio.to_thread(wakeups.notify_work)
        await asyncio.wait_for(work, 30)


async def test_a_wakeup_without_listeners_is_not_stored():
    wakeups = LocalWakeups()
    wakeups.notify_work()
    wakeups.notify_results(["a"])
    with wakeups.listen_for_work() as work, wakeups.listen_for_result("a") as result:
        await asyncio.sleep(0)

        assert not work.done()
        assert not result.done()


async def test_a_cancelled_listener_leaves_nothing_behind():
    wakeups = LocalWakeups()
    with wakeups.listen_for_work() as work, wakeups.listen_for_result("a"):
        work.cancel()
        wakeups.notify_work()
        await asyncio.sleep(0)

    assert wakeups._waiting == {}


def test_a_wakeup_for_a_closed_loop_is_dropped():
    wakeups = LocalWakeups()

    async def listen_forever():
        wakeups.listen_for_work().__enter__()

    asyncio.run(listen_forever())
    wakeups.notify_work()


def test_notify_cancelled_calls_each_callback_until_it_unsubscribes():
    wakeups = LocalWakeups()
    first: list[str] = []
    second: list[str] = []
    unsubscribe = wakeups.on_cancel(first.append)
    wakeups.on_cancel(second.append)
    wakeups.notify_cancelled("a")
    unsubscribe()
    unsubscribe()
    wakeups.notify_cancelled("b")

    assert (first, second) == (["a"], ["a", "b"])
