"""A machine whose wall clock is wrong harms no task: what is relative is counted on the server's clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from omniq import Task, TaskQueue
from omniq.clock import SYSTEM_CLOCK
from omniq.storage import open_storage
from omniq.storage.store_clock import StoreClock
from tests.acceptance.command import WorkerCommand, wait_until
from tests.fleet import clock_tasks
from tests.fleet.traces import traces

ROOT = Path(__file__).parents[2]
HOUR = 3600
AHEAD_OR_BEHIND = pytest.mark.parametrize(
    "ahead", [HOUR, pytest.param(-HOUR, marks=pytest.mark.deep)], ids=["ahead", "behind"]
)
RUN_TWICE = (
    clock_tasks.fail_once,
    clock_tasks.snooze_once,
    clock_tasks.sleep_once,
    clock_tasks.sleep_in_a_process,
)
LATEST = 20.0
"""Seconds after which the second run is too late, on a machine that is busy with other tests."""

StartWorkerAt = Callable[..., WorkerCommand]


@pytest.fixture
def start_worker_at() -> Iterator[StartWorkerAt]:
    """Start `omniq worker` on a machine whose wall clock is that many seconds ahead."""
    commands: list[WorkerCommand] = []

    def start(url: str, ahead: int) -> WorkerCommand:
        folders = [str(Path(__file__).parent / "wrong_clock"), os.environ.get("PYTHONPATH", "")]
        command = WorkerCommand(
            ROOT,
            *("--concurrency", "8", "--poll-interval", "0.2", "--log-level", "WARNING"),
            modules=(clock_tasks.__name__,),
            OMNIQ_URL=url,
            WALL_CLOCK_AHEAD=str(ahead),
            PYTHONPATH=os.pathsep.join(filter(None, folders)),
        )
        commands.append(command)
        return command

    yield start
    for command in commands:
        command.kill()
        print(command.text)  # noqa: T201 - pytest shows it when the test has failed


def times(folder: Path, name: str) -> list[float]:
    """When the task ran, in seconds of the monotonic clock."""
    return [trace.at / 1e9 for trace in traces(folder) if trace.name == name]


@AHEAD_OR_BEHIND
@pytest.mark.fault("F23")
@pytest.mark.timeout(120)
def test_retries_snoozes_sleeps_and_delays_are_on_time(
    place_on_server: str, start_worker_at: StartWorkerAt, tmp_path: Path, ahead: int
) -> None:
    folder = str(tmp_path)
    with TaskQueue(place_on_server) as queue:
        start_worker_at(place_on_server, ahead)
        for func in RUN_TWICE:
            queue.enqueue(func, folder)
        produced = queue.enqueue(clock_tasks.enqueue_later, folder, place_on_server)
        wall = produced.result(60)
        assert abs(wall - ahead - time.time()) < HOUR / 2, "the worker's clock is not wrong"

        names = [*(func.__name__ for func in RUN_TWICE), "enqueue_later"]
        wait_until(
            lambda: all(len(times(tmp_path, name)) == 2 for name in names),
            what="every task has run twice",
            within=LATEST + 60,
        )
    for name in names:
        first, second = times(tmp_path, name)
        assert clock_tasks.DELAY * 0.9 < second - first < clock_tasks.DELAY + LATEST, name


@AHEAD_OR_BEHIND
@pytest.mark.deep
@pytest.mark.fault("F23")
@pytest.mark.timeout(180)
def test_a_schedule_fires_once_a_second_beside_a_worker_with_a_wrong_clock(
    place_on_server: str, start_worker_at: StartWorkerAt, tmp_path: Path, ahead: int
) -> None:
    with TaskQueue(place_on_server) as queue:
        queue.schedules.add("tick", clock_tasks.tick, args=(str(tmp_path),), interval=1)
        wrong = start_worker_at(place_on_server, ahead)
        wait_until(lambda: len(times(tmp_path, "tick")) >= 4, what="the wrong worker alone")
        start_worker_at(place_on_server, 0)
        wait_until(lambda: len(times(tmp_path, "tick")) >= 9, what="both workers")
        wrong.kill()
        killed_at = time.monotonic()
        wait_until(
            lambda: len([at for at in times(tmp_path, "tick") if at > killed_at]) >= 4,
            what="after the wrong worker has gone",
        )
        schedule = queue.schedules.get("tick")
        assert schedule is not None
        assert schedule.next_at is not None
        in_seconds = (schedule.next_at - queue.storage.clock.now()) / timedelta(seconds=1)
    ticks = times(tmp_path, "tick")
    gaps = [later - earlier for earlier, later in pairwise(ticks)]

    assert in_seconds < 10
    assert 0.7 < median(gaps) < 3


async def test_a_producer_reads_the_time_of_the_server_again(place_on_server: str) -> None:
    async with open_storage(place_on_server) as storage:
        clock = storage.clock
        assert isinstance(clock, StoreClock)
        assert not clock.is_stale()
        # As if the server's clock had been set while the producer was idle.
        hour = HOUR * 1_000_000
        clock._offset = clock.micros() + hour - clock.boot_micros()
        clock._observed_at = clock.boot_micros() - hour
        await storage.enqueue(Task(func_path="m.f"))

        assert abs(clock.micros() - SYSTEM_CLOCK.micros()) < hour / 2
