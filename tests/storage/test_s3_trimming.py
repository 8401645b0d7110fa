"""Deleted commits: a process that was suspended for hours loses no commit, and no commit of it is ignored.

The model lets several processes run on one log, step by step: each request, each reply and each
pause is a step, and between two steps hours may pass, while any process is suspended.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omniq.errors import StorageError
from omniq.storage.backend import Document
from omniq.storage.log.replica import Replica
from omniq.storage.s3.object_log import S3Log
from omniq.storage.s3.trimming import KEPT_FOR, numbered
from tests.storage.memory_objects import SECOND, Bucket, MemoryObjects, Process

JUMPS = (1, 1, 1, 30, 600, 1_200, 4_000, 10_000)
"""Seconds that pass between two steps."""


class Fleet:
    """Processes that commit documents, save snapshots and trim the log, and what was acknowledged."""

    def __init__(self, random: Random, processes: int, lost: float) -> None:
        self.random = random
        self.bucket = Bucket(random)
        self.acknowledged: set[str] = set()
        # Long pauses let others trim meanwhile; short ones mix the requests of all.
        self._stops = random.choice((0.02, 0.05, 0.15))
        self._jumps = random.choice((0, 0.02, 0.2))
        # The clocks of two machines differ less than the factor that the rule allows.
        self.processes = [
            Process(self.bucket, number, random.choice((0.7, 1.0, 1.4)))
            for number in range(processes)
        ]
        self._objects = [MemoryObjects(self.bucket, each, lost) for each in self.processes]

    def replica(self, number: int) -> Replica:
        process = self.processes[number]
        log = S3Log(self._objects[number], process)  # type: ignore[arg-type]
        return Replica(log, process.new_id(), process, snapshot_bytes=1)

    async def work(self, number: int, commits: int) -> None:
        """Commit that many documents, one after the other."""
        replica = self.replica(number)
        for count in range(commits):
            key = f"{number}-{count}"
            try:
                await self._commit(replica, key)
                self.acknowledged.add(key)
                if self.random.random() < 0.5:
                    await replica.save(*replica.snapshot())
            except StorageError:
                replica.undo()

    async def _commit(self, replica: Replica, key: str) -> None:
        if not replica.is_loaded:
            await replica.load()
        while True:
            replica.begin()
            replica.tables.set_document("model", key, Document("model", key, b"x"))
            if await replica.commit():
                return

    async def read(self) -> set[str]:
        """What a process finds that opens the store."""
        replica = self.replica(0)
        loading = asyncio.create_task(replica.load())
        while not loading.done():
            await self.bucket.step()
        await loading
        kind = replica.tables.documents.get("model")
        return set() if kind is None else set(kind.by_key)

    async def run(self, commits: int) -> None:
        tasks = [
            asyncio.create_task(self.work(number, commits)) for number in range(len(self.processes))
        ]
        while not all(task.done() for task in tasks):
            self._disturb()
            if not await self.bucket.step():
                for process in self.processes:
                    process.is_stopped = False
        await asyncio.gather(*tasks)

    def _disturb(self) -> None:
        if self.random.random() < self._stops:
            process = self.random.choice(self.processes)
            process.is_stopped = not process.is_stopped
        if self.random.random() < self._jumps:
            self.bucket.time += self.random.choice(JUMPS) * SECOND


class NoThreads(ThreadPoolExecutor):
    """The threads of a model's event loop. The time that one takes would decide the order of the steps, not the seed."""

    def submit(self, *args: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"a step of the model would wait for a thread: {args}")


async def play(random: Random) -> None:
    asyncio.get_running_loop().set_default_executor(NoThreads())
    fleet = Fleet(random, processes=random.choice((2, 3)), lost=random.choice((0, 0.1)))
    await fleet.run(commits=4)
    for process in fleet.processes:
        process.is_stopped = False

    lost = fleet.acknowledged - await fleet.read()
    assert not lost, f"acknowledged, and not in the log: {sorted(lost)}"


LONG_RUN_EXAMPLES = int(os.environ.get("S3_MODEL_EXAMPLES", "1000"))
"""Examples in `make deep`: `S3_MODEL_EXAMPLES=20000 pytest -m deep tests/storage/test_s3_trimming.py`."""


def check_model(examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**40))
    def check(seed: int) -> None:
        asyncio.run(play(Random(seed)))

    check()


@pytest.mark.slow
def test_no_acknowledged_commit_is_lost_in_the_model():
    check_model(60)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_no_acknowledged_commit_is_lost_in_long_runs_of_the_model():
    check_model(LONG_RUN_EXAMPLES)


# One story each


class Story:
    """One process that stands still, and one that works, without interleaving."""

    def __init__(self) -> None:
        self.fleet = Fleet(Random(1), processes=2, lost=0)
        for process in self.fleet.processes:
            process._rate = 1.0
        self.bucket = self.fleet.bucket
        self.asleep, self.awake = self.fleet.replica(0), self.fleet.replica(1)

    async def do(self, work):
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.bucket.step()
        return await task

    async def commit(self, replica, key):
        await self.do(self.fleet._commit(replica, key))

    async def save(self, replica):
        await self.do(replica.save(*replica.snapshot()))

    def logged(self):
        return sorted(name for name in self.bucket.objects if name.startswith("log/"))

    def pass_time(self, seconds):
        self.bucket.time += seconds * SECOND


@pytest.fixture
def story():
    return Story()


async def test_a_process_that_stood_still_for_hours_does_not_commit_to_a_deleted_number(story):
    await story.commit(story.asleep, "a")
    for key in "bcd":
        await story.commit(story.awake, key)
    story.pass_time(2 * 3600)
    await story.save(story.awake)
    assert story.logged() == []

    await story.commit(story.asleep, "late")

    assert story.logged() == [f"log/{numbered(2)}", f"log/{numbered(5)}"]
    assert await story.fleet.read() == {"a", "b", "c", "d", "late"}


async def test_an_append_that_completes_hours_later_is_checked_before_it_is_believed(story):
    await story.commit(story.asleep, "a")
    sleeper = story.fleet.processes[0]
    late = asyncio.ensure_future(story.fleet._commit(story.asleep, "late"))
    for _ in range(20):
        await asyncio.sleep(0)
    # Its request is on the way, and arrives only after the log was trimmed.
    sleeper.is_stopped = True
    for key in "bcd":
        await story.commit(story.awake, key)
    story.pass_time(2 * 3600)
    await story.save(story.awake)
    sleeper.is_stopped = False
    await story.do(late)

    assert await story.fleet.read() == {"a", "b", "c", "d", "late"}


async def test_a_process_that_found_its_own_commit_below_others_does_not_commit_to_a_deleted_number(
    story,
):
    """It has read the end of the log, and follows only its own commit: it is behind what it has read."""
    await story.commit(story.asleep, "a")
    sleeper, objects = story.fleet.processes[0], story.asleep._log._objects
    objects._lost = 1.0
    late = asyncio.ensure_future(story.fleet._commit(story.asleep, "late"))
    await story.bucket.step()
    for _ in range(20):
        await asyncio.sleep(0)
    assert f"log/{numbered(2)}" in story.bucket.objects
    # Its request has arrived; the reply is lost, and it notices that only when it is resumed.
    sleeper.is_stopped = True
    for key in "bcd":
        await story.commit(story.awake, key)
    story.pass_time(2 * 3600)
    sleeper.is_stopped = False
    await story.do(late)
    objects._lost = 0.0
    await story.save(story.awake)
    assert story.logged() == []
    await story.commit(story.asleep, "more")

    assert await story.fleet.read() == {"a", "b", "c", "d", "late", "more"}


async def test_a_read_of_a_process_that_stood_still_for_hours_is_not_taken_for_the_end(story):
    await story.commit(story.asleep, "a")
    for key in "bcd":
        await story.commit(story.awake, key)
    story.pass_time(2 * 3600)
    await story.save(story.awake)

    assert await story.do(story.asleep.catch_up())
    assert set(story.asleep.tables.documents["model"].by_key) == set("abcd")


async def test_a_commit_is_stored_for_an_hour_also_if_a_snapshot_has_it(story):
    for key in "abc":
        await story.commit(story.awake, key)
    story.pass_time(KEPT_FOR // SECOND - 10)
    await story.save(story.awake)

    assert len(story.logged()) == 3


async def test_a_commit_that_no_snapshot_has_is_not_deleted(story):
    await story.commit(story.awake, "a")
    await story.save(story.awake)
    await story.commit(story.awake, "b")
    story.pass_time(5 * 3600)
    await story.do(story.awake._log._trimming.trim())

    assert f"log/{numbered(2)}" in story.logged()


async def test_with_a_fresh_proof_the_floor_is_not_read(story):
    await story.commit(story.awake, "a")
    story.pass_time(800)
    lists = []
    objects = story.awake._log._objects
    original = objects.list

    async def counted(folder, **options):
        lists.append(folder)
        return await original(folder, **options)

    objects.list = counted
    await story.commit(story.awake, "b")
    assert lists == []
    story.pass_time(1_000)
    await story.commit(story.awake, "c")
    assert lists == ["floor"]


async def test_only_the_newest_snapshot_and_what_is_younger_than_an_hour_stays(story):
    for key in "abc":
        await story.commit(story.awake, key)
        story.pass_time(2 * 3600)
        await story.save(story.awake)

    names = sorted(story.bucket.objects)
    assert [name for name in names if name.startswith("snap/")] == [f"snap/{numbered(3)}"]
    assert len([name for name in names if name.startswith("chunk/")]) == 1
    assert f"floor/{numbered(3)}" in names
