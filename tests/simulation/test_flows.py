"""Flows on a simulated fleet: workers die and stop, replies are lost, and every flow ends as it should."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import pytest

from omniq import (
    AsyncTaskQueue,
    AsyncWorkerPool,
    Flow,
    Settings,
    StorageError,
    TaskContext,
    TaskStatus,
    task,
)
from omniq.testing.simulation import Faults, Process, Simulation

SEEDS = int(os.environ.get("FLOW_SEEDS", "6"))
"""Seeds of the test: `FLOW_SEEDS=1000 pytest tests/simulation/test_flows.py` for more."""

FLOWS = 4


@task(max_retries=0)
async def part(number: int) -> int:
    await asyncio.sleep(0.5 + number % 3)
    return number


@task(max_retries=0)
async def add_up(numbers: list[int]) -> int:
    return sum(numbers)


@task(max_retries=0)
async def parent(ctx: TaskContext, start: int) -> int:
    numbers = await ctx.map("part", part, [start, start + 1])
    is_wanted = await ctx.wait_for("wanted", bool)
    return await ctx.call("sum", add_up, numbers) if is_wanted else 0


def a_flow(number: int) -> Flow:
    flow = Flow()
    parts = flow.map("part", part, range(number, number + 4))
    total = flow.add("total", add_up, parts)
    flow.add("parent", parent, total)
    return flow


async def work(process: Process) -> None:
    while True:
        # A worker that cannot start is started again, as a supervisor does.
        with suppress(StorageError):
            async with AsyncWorkerPool(process.storage, 3, lease=10, poll_interval=2.0):
                await asyncio.Event().wait()
        await asyncio.sleep(1)


async def scenario(simulation: Simulation) -> list[tuple[TaskStatus, int]]:
    draw = simulation.random
    async with AsyncTaskQueue(simulation.store) as queue:
        handles = [await queue.start(a_flow(number)) for number in range(FLOWS)]
        for number in range(3):
            simulation.start(f"worker-{number}", work)
        for time in range(25):
            await asyncio.sleep(draw.uniform(0.5, 3))
            machine = simulation.machines[f"worker-{draw.randrange(3)}"]
            if draw.random() < 0.5:
                machine.kill()
                simulation.start(f"worker-{time + 3}", work)
                simulation.machines[machine.name] = simulation.machines.pop(f"worker-{time + 3}")
            elif draw.random() < 0.5:
                machine.pause(draw.uniform(1, 30))
            handle = handles[time % FLOWS]
            task = await queue.get_task(f"{handle.id}.parent")
            if task is not None and not task.status.is_final:
                await queue.send_event("wanted", True, to=task.id)
        await asyncio.sleep(200)
        ends = []
        for handle in handles:
            status = await handle.status()
            value = await handle.result(0) if status is TaskStatus.SUCCESS else -1
            ends.append((status, value))
        return ends


@pytest.mark.deep_on("1", "2", "3", "4", "5")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_flow_ends_with_its_result(seed: int) -> None:
    faults = Faults(lost_reply=0.03, refused=0.03, wakeups=seed % 2 == 0)
    settings = Settings(max_crashes=1_000)
    ends = Simulation(seed, faults=faults, settings=settings).run(scenario)

    totals = [sum(range(number, number + 4)) for number in range(FLOWS)]
    assert ends == [(TaskStatus.SUCCESS, 2 * total + 1) for total in totals]
