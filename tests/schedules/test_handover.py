"""Two workers, stopped at the worst moments: every nominal time fires once and runs once."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from omniq import Settings, TaskQueue
from tests.schedules import sample_tasks

ROOT = Path(__file__).parents[2]
STEP = timedelta(milliseconds=50)
PATIENCE = 30.0
AT_ONCE = 0.5
"""Seconds for the running worker to fire; the stopped one may hold a lock meanwhile."""

BACKENDS = ["sqlite", "file"] + [
    name
    for name in ("postgres", "redis")
    if importlib.util.find_spec(f"omniq.storage.{name}") is not None
]


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/store.db"
        case "file":
            return f"file://{tmp_path}/store"
        case server:
            place: str = request.getfixturevalue(f"{server}_url")
            return place


_STARTED: list[subprocess.Popen[bytes]] = []


class Beat:
    """One worker process that can be stopped and continued."""

    def __init__(
        self, url: str, folder: Path, *, queue: str = "default", failpoints: str = ""
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.schedules.worker_process", url, str(folder), queue],
            cwd=ROOT,
            env={**os.environ, "OMNIQ_FAILPOINTS": failpoints},
        )
        self._lines = folder / f"{self._process.pid}.lines"
        _STARTED.append(self._process)

    def lines(self, word: str) -> list[str]:
        """Return the rest of each logged line that starts with that word."""
        if not self._lines.exists():
            return []
        lines = (line.split() for line in self._lines.read_text().splitlines())
        return [" ".join(rest) for first, *rest in lines if first == word]

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def dies(self) -> bool:
        """Wait, with a limit, until the process has killed itself; return whether it has."""
        try:
            return self._process.wait(PATIENCE) == -signal.SIGKILL
        finally:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """Stop the process cleanly, or kill it when it does not end."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
        try:
            assert self._process.wait(PATIENCE) == 0
        finally:
            self._process.kill()
            self._process.wait()


def wait_until(is_true: Callable[[], object], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "lines"
    path.mkdir()
    yield path
    # A test that failed has ended none of its workers.
    while _STARTED:
        process = _STARTED.pop()
        process.kill()
        process.wait()


def add_beat(queue: TaskQueue, folder: Path) -> None:
    queue.schedules.add(
        "beat",
        sample_tasks.leave_mark,
        args=(str(folder),),
        interval=STEP,
        missed="all",
        max_missed=100_000,
    )


def let_all_run(queue: TaskQueue) -> None:
    """Pause the schedule and wait for the tasks that it enqueued."""
    queue.schedules.pause("beat")
    assert wait_until(lambda: not queue.stats().by_queue.get("default"))


def alternate_once(stopped: Beat, other: Beat) -> bool:
    """Stop one worker, continue it when the other has fired; return whether the other has."""
    stopped.stop()
    before = len(other.lines("fired"))
    has_fired = wait_until(lambda: len(other.lines("fired")) > before, AT_ONCE)
    stopped.resume()
    return has_fired


def alternate(url: str, folder: Path, times: int) -> tuple[list[str], list[str]]:
    """Let the workers alternate that many times; return the times that fired and that ran."""
    with TaskQueue(url, settings=Settings(durability="os")) as queue, ExitStack() as stack:
        beats = [Beat(url, folder) for _ in range(2)]
        for beat in beats:
            stack.callback(beat.end)
        assert wait_until(lambda: all(beat.lines("ready") == [""] for beat in beats))
        add_beat(queue, folder)
        handed = 0
        deadline = time.monotonic() + times * 2 + PATIENCE
        while handed < times and time.monotonic() < deadline:
            handed += alternate_once(*beats)
            beats.reverse()
        assert handed == times
        let_all_run(queue)
    fired = sorted(line for beat in beats for line in beat.lines("fired"))
    ran = sorted(line for beat in beats for line in beat.lines("ran"))
    return fired, ran


def check_each_once(times: list[str]) -> None:
    assert len(set(times)) == len(times), "a nominal time was there twice"
    first, last = (datetime.fromisoformat(text) for text in (times[0], times[-1]))
    assert len(times) == (last - first) / STEP + 1, "a nominal time was missed"


def check(url: str, folder: Path, times: int) -> None:
    fired, ran = alternate(url, folder, times)

    assert len(fired) >= times
    check_each_once(fired)
    assert ran == fired


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F85")
def test_each_nominal_time_fires_once_while_two_workers_alternate(url: str, folder: Path) -> None:
    check(url, folder, 20)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_each_nominal_time_fires_once_while_two_workers_alternate_200_times(
    url: str, folder: Path
) -> None:
    check(url, folder, 200)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "failpoint", ["schedule.before_fire", "file.record.after_commit", "schedule.after_fire"]
)
@pytest.mark.fault("F85")
def test_a_worker_that_dies_while_it_fires_loses_and_repeats_no_time(
    url: str, folder: Path, failpoint: str
) -> None:
    if failpoint.startswith("file.") and not url.startswith("file:"):
        pytest.skip("a step that this storage does not have")
    with TaskQueue(url, settings=Settings(durability="os")) as queue, ExitStack() as stack:
        # It runs none of the tasks, or one of them would have to wait for its lease.
        victim = Beat(url, folder, queue="another", failpoints=f"{failpoint}=kill")
        add_beat(queue, folder)
        assert victim.dies()
        heir = Beat(url, folder)
        stack.callback(heir.end)
        assert wait_until(lambda: len(heir.lines("ran")) >= 5)
        let_all_run(queue)
        schedule = queue.schedules.get("beat")

    assert schedule is not None
    assert schedule.start is not None
    ran = sorted(heir.lines("ran"))
    check_each_once(ran)
    assert ran[0] == schedule.start.isoformat()
