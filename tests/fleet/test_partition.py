"""A worker in a silent partition stops its tasks before other workers start them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omniq import AsyncTaskQueue
from omniq.testing.fault_proxy import FaultProxy
from tests.fleet.fleet_tasks import hold_at_first, note
from tests.fleet.traces import Trace, traces
from tests.worker.recorder import until

LEASE = 2.0


def first(folder: Path, what: str) -> Trace | None:
    return next((trace for trace in traces(folder) if trace.what == what), None)


@pytest.mark.slow
@pytest.mark.deep_on("postgres")
@pytest.mark.timeout(120)
@pytest.mark.fault("F34")
async def test_a_cut_off_worker_stops_its_task_before_another_starts_it(
    place_on_server, start_worker, tmp_path
):
    """F21, F34: no connection is refused or closed; there are just no more replies."""
    options = ("--lease", str(LEASE), "--poll-interval", "0.2")
    async with FaultProxy(place_on_server) as proxy, AsyncTaskQueue(place_on_server) as queue:
        cut_off = start_worker(proxy.url, *options)
        handle = await queue.enqueue(hold_at_first, str(tmp_path), "task")
        await until(lambda: first(tmp_path, "started-1"), patience=30)
        other = start_worker(place_on_server, *options, "--log-level", "INFO")
        await asyncio.to_thread(other.wait_for, "worker.started", within=30)
        proxy.partition()
        assert await handle.result(timeout=30) == 2
        stopped, started = first(tmp_path, "stopped-1"), first(tmp_path, "started-2")

        assert stopped is not None
        assert started is not None
        assert stopped.pid != started.pid
        assert stopped.at < started.at

        # More than two leases have passed; reconnected, the worker claims tasks again.
        await asyncio.sleep(LEASE)
        other.process.terminate()
        assert await asyncio.to_thread(other.ends) == 0
        await proxy.heal()
        later = await queue.enqueue(note, str(tmp_path), "later")
        assert await later.result(timeout=20) == "later"
        assert first(tmp_path, "ran") is not None
        assert await handle.result(timeout=30) == 2
        cut_off.process.terminate()
        assert await asyncio.to_thread(cut_off.ends) == 0
