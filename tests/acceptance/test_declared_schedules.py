"""`@task(cron=…)` in a worker's module is a schedule as soon as the worker runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from omniq import TaskQueue
from tests.acceptance.command import wait_until

CODE = """
from omniq import task

@task(interval=0.1)
def tick():
    return "tick"

@task(cron="0 3 * * *", tz="Europe/Berlin")
def nightly():
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.deep_on("1")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_stores_and_fires_the_schedules_of_its_modules(
    folder: Path, queue: TaskQueue, run_worker, processes: str
) -> None:
    package = folder / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("from shop import clockwork\n")
    (package / "clockwork.py").write_text(CODE)
    worker = run_worker("--processes", processes, modules=("shop",))
    wait_until(lambda: len(queue.list_tasks(func_path="shop.clockwork.tick")) >= 3, "ticks")
    schedules = {schedule.id: schedule for schedule in queue.schedules.list()}
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0

    (package / "clockwork.py").write_text(CODE.replace("0.1", "3600").replace("@task(cron", "#"))
    run_worker("--processes", processes, modules=("shop",))
    wait_until(
        lambda: [each.interval for each in queue.schedules.list()] == [3600.0],
        "one to change and the other one to go",
    )
    (left,) = queue.schedules.list()

    assert schedules.keys() == {"shop.clockwork.tick", "shop.clockwork.nightly"}
    assert schedules["shop.clockwork.nightly"].tz == "Europe/Berlin"
    assert (left.id, left.interval) == ("shop.clockwork.tick", 3600.0)
