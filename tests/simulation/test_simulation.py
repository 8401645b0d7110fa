"""The simulation itself: its time is virtual, it is deterministic, and its faults do happen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from omniq import AsyncWorkerPool, StorageError, TaskStatus
from omniq.testing.builders import a_task
from omniq.testing.simulation import Faults, Process, Simulation, current_machine
from omniq.testing.virtual_time import Deadlock

HOUR = 3600.0


async def hold(process: Process) -> None:
    """Claim all tasks and run none of them."""
    await process.storage.open()
    await process.storage.renew(lease=10)
    await process.storage.reserve(10)
    await asyncio.Event().wait()


def test_virtual_hours_take_no_real_time():
    async def sleep(simulation: Simulation) -> float:
        await asyncio.sleep(24 * HOUR)
        return simulation.seconds

    began = time.monotonic()
    assert Simulation(1).run(sleep) == 24 * HOUR
    assert time.monotonic() - began < HOUR


def test_a_deadlock_raises_an_error_and_does_not_hang():
    async def wait(_: Simulation) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        Simulation(1).run(wait)


def test_a_killed_machine_runs_nothing_more_not_even_finally_blocks():
    done: list[str] = []

    async def work(_: Process) -> None:
        try:
            await asyncio.sleep(10)
            done.append("slept")
        finally:
            done.append("cleaned up")

    async def scenario(simulation: Simulation) -> list[str]:
        victim = simulation.start("victim", work)
        await asyncio.sleep(5)
        victim.kill()
        await asyncio.sleep(HOUR)
        return list(done)

    assert Simulation(1).run(scenario) == []


def test_a_paused_machine_continues_late_where_it_was():
    woke: list[float] = []

    async def work(process: Process) -> None:
        await asyncio.sleep(1)
        woke.append(process.clock.monotonic())

    async def scenario(simulation: Simulation) -> None:
        sleeper = simulation.start("sleeper", work)
        await asyncio.sleep(0.5)
        sleeper.pause(30)
        await asyncio.sleep(60)

    Simulation(1).run(scenario)
    assert woke == [30.5]


def test_a_call_that_was_sent_takes_effect_although_its_sender_died():
    async def scenario(simulation: Simulation) -> TaskStatus | None:
        async def enqueue(process: Process) -> None:
            await process.storage.open()
            await process.storage.enqueue(a_task("t1"))

        sender = simulation.start("sender", enqueue)
        # The second call is the enqueue, which takes at least a tenth of a millisecond.
        for _ in range(10_000):
            if simulation.network.calls == 2:
                break
            await asyncio.sleep(0.00005)
        sender.kill()
        await asyncio.sleep(1)
        task = await simulation.store.get_task("t1")
        return None if task is None else task.status

    assert Simulation(1).run(scenario) is TaskStatus.PENDING


def test_a_lost_reply_is_an_error_for_the_sender_but_the_store_has_done_the_call():
    errors: list[StorageError] = []

    async def scenario(simulation: Simulation) -> int:
        async def enqueue(process: Process) -> None:
            await process.storage.open()
            simulation.network.faults = Faults(lost_reply=1.0)
            try:
                await process.storage.enqueue(a_task("t1"))
            except StorageError as error:
                errors.append(error)

        simulation.start("sender", enqueue)
        await asyncio.sleep(20)
        return await simulation.store.count_waiting()

    assert Simulation(1).run(scenario) == 1
    assert len(errors) == 1


def test_a_partition_isolates_one_machine_and_no_other():
    reached: list[str] = []

    async def connect(process: Process) -> None:
        try:
            await process.storage.open()
            reached.append(process.name)
        except StorageError:
            pass

    async def scenario(simulation: Simulation) -> None:
        first = simulation.start("first", connect)
        simulation.network.cut(10, first)
        simulation.start("second", connect)
        await asyncio.sleep(30)

    Simulation(1).run(scenario)
    assert reached == ["second"]


def test_a_machine_may_have_a_wrong_clock_while_the_store_has_the_right_one():
    offsets: list[float] = []

    async def read_skew(process: Process) -> None:
        offsets.append(process.clock.skew.total_seconds())
        assert current_machine() is process

    async def scenario(simulation: Simulation) -> None:
        simulation.start("one", read_skew)
        simulation.start("two", read_skew)
        await asyncio.sleep(1)

    Simulation(1, faults=Faults(skew=60)).run(scenario)
    assert len(set(offsets)) == 2
    assert all(-60 <= offset <= 60 for offset in offsets)


def test_the_tasks_of_a_killed_worker_are_given_back_after_its_lease():
    async def scenario(simulation: Simulation) -> list[int]:
        await simulation.store.enqueue(a_task("t1"))
        holder = simulation.start("holder", hold)
        await asyncio.sleep(1)
        holder.kill()
        counts = []
        for _ in range(2):
            counts.append(len(await simulation.store.give_back_abandoned()))
            await asyncio.sleep(10)
        return [*counts, len(await simulation.store.give_back_abandoned())]

    assert Simulation(1).run(scenario) == [0, 1, 0]


def test_a_whole_pool_runs_on_virtual_time():
    async def work(process: Process) -> None:
        async with AsyncWorkerPool(process.storage, lease=30):
            await asyncio.Event().wait()

    async def scenario(simulation: Simulation) -> int:
        simulation.start("worker", work)
        await asyncio.sleep(HOUR / 4)
        return len(await simulation.store.workers())

    assert Simulation(1).run(scenario) == 1


@pytest.mark.timeout(120)
def test_a_seed_replays_exactly_in_another_process():
    """Another process has other hash seeds and addresses; the trace must not depend on them."""
    code = (
        "from chaos.simulated import Fleet\n"
        "for seed in (3, 13, 50):\n"
        "    fleet = Fleet(seed); fleet.run(); print(fleet.simulation.network.trace)\n"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }

    assert len(traces) == 1
    assert len(traces.pop().split()) == 3
