"""A worker with a wrong clock takes no task from another worker, and no task is lost."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from omniq.clock import SystemClock
from omniq.models import TaskStatus
from omniq.storage import open_storage
from omniq.testing.builders import a_result, some_tasks

HOUR = 3_600_000_000


@pytest.fixture(params=["file", "sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "file":
            return f"file://{tmp_path}/store?durability=os"
        case "sqlite":
            return f"sqlite:///{tmp_path}/store.db?durability=os"
        case server:
            found: str = request.getfixturevalue(f"{server}_url")
            return found


@pytest.mark.fault("F23", "F24")
@pytest.mark.parametrize("skew", [HOUR, -HOUR], ids=["fast", "slow"])
async def test_a_worker_whose_clock_is_an_hour_off_takes_nothing_from_others(
    url, skew, monkeypatch
):
    right_micros, right_now = SystemClock.micros, SystemClock.now
    async with open_storage(url) as honest:
        await honest.enqueue_many(some_tasks("ab"))
        (held,) = await honest.reserve(1)
        monkeypatch.setattr(SystemClock, "micros", lambda self: right_micros(self) + skew)
        monkeypatch.setattr(
            SystemClock, "now", lambda self: right_now(self) + timedelta(microseconds=skew)
        )
        async with open_storage(url) as skewed:
            given_back = await skewed.give_back_abandoned()
            taken = [task.id for task in await skewed.reserve(5)]
            workers = {worker.id for worker in await skewed.workers()}
        monkeypatch.undo()
        await honest.mark_done(held.id, a_result(held))
        done = await honest.get_task(held.id)

    assert held.id == "a"
    assert given_back == []
    assert "a" not in taken
    assert honest.owner in workers
    assert done is not None
    assert done.status is TaskStatus.SUCCESS


@pytest.mark.fault("F63")
@pytest.mark.parametrize("stamp", [0, 4_000_000_000], ids=["1970", "2096"])
async def test_the_time_stamps_of_files_do_not_matter(stamp, tmp_path):
    place = f"file://{tmp_path}/store?durability=os"
    async with open_storage(place) as storage:
        await storage.enqueue_many(some_tasks("abcd"))
        held = await storage.reserve(1)
        touched = 0
        for path in (tmp_path / "store").rglob("*"):
            os.utime(path, (stamp, stamp), follow_symlinks=False)
            touched += 1
        async with open_storage(place) as other:
            for path in (tmp_path / "store").rglob("*"):
                os.utime(path, (stamp, stamp), follow_symlinks=False)
            given_back = await other.give_back_abandoned()
            claimed = [task.id for task in await other.reserve(10)]
            await other.purge_expired()
        await storage.mark_done(held[0].id, a_result(held[0]))

    assert touched > 10
    assert given_back == []
    assert claimed == ["b", "c", "d"]
