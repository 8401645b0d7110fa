"""After a process was killed between any two steps of the protocol, every promise still holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from omniq.models import TaskResult, TaskStatus
from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.file_names import RowName, id_of, parse
from tests.storage.file_victim import NextBoot

PASSES = {
    "file.enqueue.before_link": 6,
    "file.enqueue.after_link": 6,
    "file.enqueue.before_publish": 6,
    "file.enqueue.after_publish": 13,
    "file.claim.after_rename": 12,
    "file.record.after_part": 11,
    "file.record.after_take": 19,
    "file.record.after_commit": 12,
    "file.record.after_rename": 2,
    "file.record.before_result": 5,
    "file.record.after_result": 5,
    "file.record.before_clear": 16,
    "file.requeue.before_task": 11,
    "file.requeue.after_task": 11,
    "file.recover.after_fence": 1,
}
"""How often the victim passes each failpoint."""

ALL = [(place, nth) for place, times in PASSES.items() for nth in range(1, times + 1)]
SOME = [(place, nth) for place, nth in ALL if nth % 10 == 1]


def run_victim(folder: Path, failpoints: str, *more: str) -> tuple[int, list[list[str]]]:
    victim = subprocess.run(
        [sys.executable, "-m", "tests.storage.file_victim", str(folder), *more],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMNIQ_FAILPOINTS": failpoints},
        capture_output=True,
        text=True,
        check=False,
    )
    assert victim.returncode in (0, -signal.SIGKILL), victim.stderr
    return victim.returncode, [line.split() for line in victim.stdout.splitlines()]


def records(folder: Path) -> Counter[str]:
    """The number of files of each task: in the folder of live tasks, or else its result."""
    found: Counter[str] = Counter()
    for name in live_names(folder):
        parsed = parse(name)
        found[parsed.key if isinstance(parsed, RowName) else name] += 1
    for name in os.listdir(folder / "results"):
        task_id = id_of(name, ".result")
        if task_id is not None and task_id not in found:
            found[task_id] += 1
    return found


def live_names(folder: Path) -> list[str]:
    """The names of live tasks, and of writes that are not ended."""
    return [name for name in os.listdir(folder / "tasks") if not name.endswith(".doc")]


async def assert_promises_hold(folder: Path, lines: list[list[str]]) -> None:
    """Check that every promise holds, and that every task that is left can be run, once."""
    enqueued = {line[1] for line in lines if line[0] == "enqueued"}
    retried = {line[1] for line in lines if line[0] == "retried"}
    ended = {line[1]: line[2] for line in lines if line[0] == "ended"}
    clock = NextBoot(2)
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        await storage.give_back_abandoned()
        for task_id in enqueued:
            assert await storage.get_task(task_id) is not None, f"{task_id} is gone"
        assert set(records(folder).values()) <= {1}
        for task_id, status in ended.items():
            task = await storage.get_task(task_id)
            assert task is not None
            assert task.status == status or task_id in retried

        claimed: set[str] = set()
        while tasks := await storage.reserve(1):
            assert not claimed & {task.id for task in tasks}, "claimed twice"
            claimed.update(task.id for task in tasks)
            for task in tasks:
                done = TaskResult(task_id=task.id, status=TaskStatus.SUCCESS)
                await storage.mark_done(task.id, done)
        stats = await storage.stats()

    assert not claimed & (ended.keys() - retried), "an ended task was run"
    assert not any(count for status, count in stats.by_status.items() if not status.is_final)
    assert not list((folder / "corrupt").iterdir())
    assert not live_names(folder)


@pytest.mark.deep
@pytest.mark.parametrize(("place", "nth"), [each for each in ALL if each not in SOME])
@pytest.mark.fault("F02")
async def test_a_process_killed_at_any_failpoint_loses_no_task_and_repeats_none(
    place, nth, tmp_path
):
    await assert_killed_without_harm(place, nth, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "nth"), SOME)
async def test_a_process_killed_at_a_failpoint_loses_no_task_and_repeats_none(place, nth, tmp_path):
    await assert_killed_without_harm(place, nth, tmp_path)


async def assert_killed_without_harm(place: str, nth: int, tmp_path: Path) -> None:
    status, lines = run_victim(tmp_path, f"{place}=kill@{nth}")

    assert status == -signal.SIGKILL, "the failpoint was not passed that often"
    await assert_promises_hold(tmp_path, lines)


@pytest.mark.slow
@pytest.mark.deep_on("4", "7")
@pytest.mark.parametrize("place", ["file.recover.before_part", "file.recover.after_part"])
@pytest.mark.parametrize("nth", [1, 4, 7])
@pytest.mark.fault("F27")
async def test_a_process_killed_while_it_finishes_changes_of_a_dead_one_loses_nothing(
    place, nth, tmp_path
):
    _, lines = run_victim(tmp_path, f"file.record.after_commit=kill@{nth}")
    status, _ = run_victim(tmp_path, f"{place}=kill", "recover")

    assert status == -signal.SIGKILL, "there was nothing to finish"
    await assert_promises_hold(tmp_path, lines)
