"""Processes that append to one log take turns: fair shares, and no wait for a process that is alone."""

from __future__ import annotations

import asyncio
import time

import pytest

from omniq.clock import SYSTEM_CLOCK
from omniq.storage.log import LogStorage
from omniq.storage.log.append_order import AppendOrder
from omniq.testing.builders import a_task
from tests.storage.memory_log import CAPABILITIES, MemoryLog, Records

PUT, GET = 0.01, 0.004


class SlowLog(MemoryLog):
    """A log with the latency of a server."""

    async def append(self, number, data):
        await asyncio.sleep(PUT / 2)
        is_won = await super().append(number, data)
        await asyncio.sleep(PUT / 2)
        return is_won

    async def read(self, first):
        await asyncio.sleep(GET / 2)
        found = await super().read(first)
        await asyncio.sleep(GET / 2)
        return found


def slow_storage(records):
    return LogStorage(
        lambda: SlowLog(records, SYSTEM_CLOCK), capabilities=CAPABILITIES, clock=SYSTEM_CLOCK
    )


async def commits_of(storages, seconds):
    """How many enqueues each of them makes in that time, all at the same time."""
    deadline = time.monotonic() + seconds

    async def work(storage):
        count = 0
        while time.monotonic() < deadline:
            await storage.enqueue(a_task())
            count += 1
        return count

    return await asyncio.gather(*map(work, storages))


def ring(*commits, own="b"):
    order = AppendOrder(own)
    for writer, competes in commits:
        order.note(writer, competes=bool(competes))
    return order


@pytest.mark.parametrize(
    ("commits", "before"),
    [
        ([], 0),
        # Who does not compete has no turn.
        ([("a", 0), ("c", 0)], 0),
        ([("c", 1), ("a", 1)], 0),
        ([("a", 1), ("c", 1)], 1),
        ([("a", 1), ("c", 1), ("d", 1)], 1),
        ([("a", 1), ("c", 1), ("b", 1)], 1),
        ([("a", 1), ("b", 1), ("c", 1), ("a", 0), ("b", 0)], 2),
        # a has let its turn pass, then c.
        ([("a", 1), ("b", 1), ("c", 1), ("b", 0)], 1),
        ([("a", 1), ("b", 1), ("c", 1), ("b", 0), ("b", 0)], 0),
        # Also if the one that has waited for them had no turn before.
        ([("a", 1), ("c", 1), ("b", 1), ("d", 1), ("b", 0)], 1),
    ],
)
def test_those_that_compete_have_turns_until_they_let_one_pass(commits, before):
    assert ring(*commits).before_own() == before


async def test_a_process_that_is_alone_never_waits():
    records = Records()
    async with slow_storage(records) as storage:
        await storage.enqueue(a_task())
        reads, appends = records.reads, records.appends
        (count,) = await commits_of([storage], 0.5)

        assert count > 0
        assert records.reads == reads
        assert records.appends - appends <= count + 1


async def shares_of(processes, seconds):
    """The largest share by the smallest, and the appends for each commit."""
    records = Records()
    storages = [slow_storage(records) for _ in range(processes)]
    for storage in storages:
        await storage.open()
    await commits_of(storages, 0.3)
    appends, end = records.appends, records.end
    counts = await commits_of(storages, seconds)
    used = (records.appends - appends) / (records.end - end)
    for storage in storages:
        await storage.close()
    return max(counts) / min(counts), used


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_eight_processes_that_compete_have_fair_shares():
    # A busy machine delays one of them now and then: the best of five runs counts.
    best = 9.0, 9.0
    for _ in range(5):
        best = min(best, await shares_of(8, seconds=3))
        if best < (1.5, 1.5):
            break

    assert best[0] <= 1.5, "the shares differ"
    assert best[1] <= 1.5, "too many appends are refused"


async def test_processes_that_died_keep_the_others_waiting_once():
    records = Records()
    storages = [slow_storage(records) for _ in range(4)]
    for storage in storages:
        await storage.open()
    await commits_of(storages, 0.5)
    survivor = storages[0]
    await survivor.enqueue(a_task())
    await survivor.enqueue(a_task())
    reads = records.reads
    for _ in range(10):
        await survivor.enqueue(a_task())

    assert records.reads == reads, "it waits for turns of others, and reads the log meanwhile"
    for storage in storages:
        await storage.close()
