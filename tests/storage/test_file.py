"""What the file backend guarantees beyond the contract: names, modes, races, costs."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

from omniq import failpoints
from omniq.errors import DuplicateTask, LeaseLost, StorageError
from omniq.models import BreakerRule, Limit, Task, TaskStatus
from omniq.outcomes import Failed, Released, Retried, Succeeded
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.file import FileStorage
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.listed_records import ListedRecords
from omniq.storage.file.shared_file import pack
from omniq.storage.file.wakeups import FolderWatch
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from tests.storage.drain_together import drain_together
from tests.worker.recorder import until

FAST = Settings(durability="os")
SAFE = Settings(durability="power")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tasks"


@pytest.fixture
async def storage(folder, clock):
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        yield storage


@pytest.fixture
async def another(folder, clock):
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        yield storage


@pytest.fixture
def no_failpoints():
    yield
    failpoints.reset()


def names(folder: Path, of: str) -> list[str]:
    return sorted(os.listdir(folder / of))


# Files


async def test_a_task_is_a_file_that_is_renamed_through_its_life(storage, folder):
    await storage.enqueue(a_task("a"))
    assert names(folder, "queue") == ["a.task"]

    (task,) = await storage.reserve(1)
    (running,) = names(folder, "queue")
    assert running.startswith(f"a.1.{storage.owner}.")
    assert running.endswith(".running")

    await storage.mark_done("a", a_result(task))
    assert names(folder, "queue") == []
    assert names(folder, "results") == ["a.result"]


async def test_a_final_failure_leaves_a_result_and_a_dead_letter(storage, folder):
    await storage.enqueue(a_task("a"))
    await storage.reserve(1)
    await storage.mark_failed("a", an_error(), will_retry=False)

    assert names(folder, "queue") == []
    assert names(folder, "results") == ["a.result"]
    assert names(folder, "dead") == ["a.dead"]


@pytest.mark.parametrize(
    "task_id",
    ["a.b", "a.task", "a.1.W.2.running", "a.1.N.done", "a.result", "-.-", "_", "v1..2", "x" * 128],
)
async def test_ids_with_dots_work_like_other_ids(task_id, storage, another, folder):
    await storage.enqueue(a_task(task_id))
    (task,) = await another.reserve(1)
    await another.mark_failed(task_id, an_error(), will_retry=True)
    await another.reschedule(task_id, another.clock.now())
    (task,) = await storage.reserve(1)
    await storage.mark_done(task_id, a_result(task))

    assert (task.id, task.token) == (task_id, 2)
    found = await another.get_task(task_id)
    assert found is not None
    assert found.status is TaskStatus.SUCCESS
    assert names(folder, "queue") == []


async def test_files_are_readable_only_by_their_user_with_any_umask(folder, clock):
    before = os.umask(0)
    try:
        async with FileStorage(folder, settings=SAFE, clock=clock) as storage:
            await storage.enqueue_many(some_tasks("abc", unique=None))
            await storage.enqueue(a_task("u", unique="key"))
            (task, *_) = await storage.reserve(3)
            await storage.save_checkpoint(task.id, task.token, b"checkpoint")
            await storage.mark_done(task.id, a_result(task))
            await storage.pause_queue("default")
            found = [path.lstat().st_mode for path in folder.rglob("*")]
    finally:
        os.umask(before)

    modes = {(stat.S_ISDIR(mode), stat.S_IMODE(mode)) for mode in found}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes == {(True, 0o700), (False, 0o600)}


async def test_a_single_storage_leaves_no_temporary_files(storage, folder):
    await storage.enqueue_many(some_tasks("abc"))
    for task in await storage.reserve(3):
        await storage.mark_done(task.id, a_result(task))

    assert names(folder, "tmp") == []
    assert names(folder, "queue") == []


# Several processes and storages


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("durability", ["os", "power"])
@pytest.mark.fault("F25")
async def test_eight_processes_drain_one_folder_and_claim_each_task_once(folder, durability):
    url = f"file:{folder}?durability={durability}"
    drained = await drain_together(url, processes=8, tasks=5000 if durability == "os" else 1000)

    assert drained.errors == ""
    assert set(drained.claims.values()) == {1}
    assert len(drained.claims) == (5000 if durability == "os" else 1000)
    assert drained.refused == 0
    assert names(folder, "queue") == []


async def test_concurrent_enqueues_of_one_id_enqueue_one_task(storage, another):
    async def enqueue(through: FileStorage, task_id: str) -> bool:
        try:
            await through.enqueue(a_task(task_id))
        except DuplicateTask:
            return False
        return True

    ids = [f"task-{number}" for number in range(50)]
    tries = [enqueue(through, task_id) for task_id in ids for through in (storage, another)]
    succeeded = await asyncio.gather(*tries)

    assert sum(succeeded) == len(ids)
    assert len(await storage.reserve(200)) == len(ids)


async def test_concurrent_enqueues_with_one_unique_key_enqueue_one_task(storage, another):
    tries = [
        through.enqueue(a_task(f"task-{number}", unique="key"))
        for number in range(20)
        for through in (storage if number % 2 else another,)
    ]
    holders = await asyncio.gather(*tries)

    assert len(set(holders)) == 1
    assert len(await storage.reserve(50)) == 1


async def test_a_unique_key_of_an_earlier_task_with_the_same_id_is_free(storage):
    await storage.enqueue(a_task("a", unique="key", result_ttl=0))
    (task,) = await storage.reserve(1)
    await storage.mark_done("a", a_result(task))

    ids = await storage.enqueue_many([a_task("a"), a_task("b", unique="key")])

    assert ids == ["a", "b"]


@pytest.mark.fault("F28")
async def test_concurrent_recoveries_give_back_each_task_once_and_charge_only_the_suspect(
    folder, clock
):
    async with (
        FileStorage(folder, settings=FAST, clock=clock) as one,
        FileStorage(folder, settings=FAST, clock=clock) as two,
    ):
        lost = FileStorage(folder, settings=FAST, clock=clock)
        await lost.open()
        await one.enqueue(a_task("suspect"))
        await lost.reserve(1)
        clock.advance(60)
        await one.give_back_abandoned()
        await one.enqueue_many(some_tasks([f"task-{number}" for number in range(100)]))
        with pytest.raises(LeaseLost):
            await lost.reserve(1)
        held = await lost.reserve(200)
        clock.advance(60)

        given = await asyncio.gather(one.give_back_abandoned(), two.give_back_abandoned())
        tasks = await one.list_tasks(limit=1000)

    ids = [back.task_id for those in given for back in those]
    assert sorted(ids) == sorted(task.id for task in held)
    assert {task.id: task.crashes for task in tasks if task.crashes} == {"suspect": 2}


async def test_a_holder_that_no_longer_runs_is_removed_from_its_gate(folder, clock):
    """The state after a process has died between recording an outcome and leaving the gate."""
    only_one = (Limit(key="k", max_running=1),)
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        await storage.enqueue_many(some_tasks("ab", limits=only_one))
        (first,) = await storage.reserve(2)
        (running,) = [name for name in names(folder, "queue") if name.endswith(".running")]
        os.unlink(folder / "queue" / running)

        (second,) = await storage.reserve(2)

    assert (first.id, second.id) == ("a", "b")


# Unfinished work of processes that died


@pytest.mark.fault("F60")
async def test_an_intent_of_a_dead_process_is_enqueued_by_the_next_storage(
    folder, clock, no_failpoints
):
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        failpoints.configure("file.enqueue.after_link=raise:EIO")
        with pytest.raises(StorageError):
            await storage.enqueue(a_task("withdrawn"))
        failpoints.reset()
        await storage.enqueue(a_task("a"))
        # The state after its process has died between the last two steps, long ago.
        intent = folder / "tmp" / "a.task.tmp"
        os.rename(folder / "queue" / "a.task", intent)
        os.utime(intent, (0, 0))

    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        assert [task.id for task in await storage.reserve(5)] == ["a"]


async def test_a_breaker_waits_for_the_outcome_of_a_probe_that_has_ended(
    storage, another, clock, no_failpoints
):
    """The owner reports to the breaker after recording the outcome; until then none may enter."""
    rules = (BreakerRule(name="b", max_failures=1, reset_timeout=5),)
    await storage.enqueue_many(some_tasks("abc", breakers=rules))
    (first,) = await storage.reserve(1)
    await storage.record([Failed("a", first.token, an_error())])
    clock.advance(5)
    (probe,) = await storage.reserve(1)
    failpoints.configure("file.record.after_commit=raise:EIO")
    with pytest.raises(StorageError):
        await storage.record([Failed("b", probe.token, an_error())])
    failpoints.reset()

    assert await another.reserve(5) == []
    clock.advance(0.999)
    assert await another.reserve(5) == []
    clock.advance(0.001)
    assert [task.id for task in await another.reserve(5)] == ["c"]


@pytest.mark.fault("F60")
async def test_a_committed_change_that_was_not_finished_is_found_by_id(
    storage, another, no_failpoints
):
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    failpoints.configure("file.record.after_commit=raise:EIO")
    with pytest.raises(StorageError):
        await storage.mark_done("a", a_result(task, 42))
    failpoints.reset()

    result = await another.get_result("a")
    assert result is not None
    assert result.result == 42
    assert await storage.record([Succeeded("a", 1, a_result(task, 42))]) == [True]


async def test_the_outcome_of_a_cancelled_run_does_not_requeue_the_task(storage, another):
    await storage.enqueue(a_task("a"))
    await storage.reserve(1)

    assert await another.cancel("a")
    assert await storage.record([Released("a", 1)]) == [True]
    assert await another.reserve(1) == []
    found = await another.get_task("a")
    assert found is not None
    assert found.status is TaskStatus.CANCELLED


async def test_the_claims_of_a_cancelled_caller_are_undone(storage, another):
    await storage.renew()
    await storage.enqueue_many(some_tasks("abc"))
    reserve = asyncio.create_task(storage.reserve(2))
    await asyncio.sleep(0)
    reserve.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserve

    assert await storage.held_by(storage.owner) == {}
    assert [(task.id, task.token) for task in await another.reserve(3)] == [
        ("a", 1),
        ("b", 1),
        ("c", 1),
    ]


# Errors


@pytest.mark.parametrize(
    "place", ["file.enqueue.before_link", "file.enqueue.after_link", "file.enqueue.before_publish"]
)
@pytest.mark.fault("F54")
async def test_a_full_disk_raises_an_error_that_says_so_and_leaves_no_files(
    place, storage, folder, no_failpoints
):
    failpoints.configure(f"{place}=raise:ENOSPC@1")
    with pytest.raises(StorageError, match="no space left") as caught:
        await storage.enqueue_many(some_tasks("abc"))

    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert names(folder, "queue") == names(folder, "tmp") == []
    assert await storage.enqueue_many(some_tasks("abc")) == ["a", "b", "c"]


@pytest.mark.fault("F53")
async def test_a_file_that_could_not_be_synced_is_not_enqueued(folder, clock, monkeypatch):
    real, calls = os.fsync, []

    def fail_once(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    async with FileStorage(folder, settings=SAFE, clock=clock) as storage:
        monkeypatch.setattr(os, "fsync", fail_once)
        with pytest.raises(StorageError):
            await storage.enqueue_many(some_tasks("abc", args=["large" * 2000]))

        assert names(folder, "queue") == names(folder, "tmp") == []
        assert await storage.enqueue_many(some_tasks("abc")) == ["a", "b", "c"]


FORK = """
import asyncio, os, sys
from omniq.errors import StorageError
from omniq.models import Task
from omniq.storage.file import FileStorage

async def main():
    async with FileStorage(sys.argv[1]) as storage:
        if os.fork() == 0:
            try:
                await storage.enqueue(Task(func_path="m.f"))
            except StorageError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()

asyncio.run(main())
"""


@pytest.mark.fault("F97")
def test_the_storage_of_a_parent_process_is_refused_in_a_forked_process(folder):
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "after a fork; open a separate storage in each process" in child.stdout


@pytest.mark.fault("F62")
async def test_a_network_file_system_is_refused(folder, monkeypatch):
    device = os.stat(folder.parent).st_dev
    line = f"1 0 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/export rw\n"
    real = Path.read_text

    def read_text(path: Path, *args: str, **options: str) -> str:
        return line if str(path) == "/proc/self/mountinfo" else real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(StorageError, match="network file system"):
        await FileStorage(folder).open()


# Costs


class Calls:
    """Counts the system calls that list and open files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed = self.opened = self.synced = 0
        scandir, opening, fsync = os.scandir, os.open, os.fsync

        def count_scandir(*args, **options):
            self.listed += 1
            return scandir(*args, **options)

        def count_open(*args, **options):
            self.opened += 1
            return opening(*args, **options)

        def count_fsync(fd):
            self.synced += 1
            return fsync(fd)

        monkeypatch.setattr(os, "scandir", count_scandir)
        monkeypatch.setattr(os, "open", count_open)
        monkeypatch.setattr(os, "fsync", count_fsync)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F61", "F96")
async def test_a_claim_costs_the_same_among_20_000_tasks_as_among_20(folder, monkeypatch):
    costs = []
    for count in (20, 20_000):
        async with FileStorage(folder / str(count), settings=FAST) as storage:
            for start in range(0, count, 1000):
                tasks = [Task(func_path="m.f") for _ in range(start, min(start + 1000, count))]
                await storage.enqueue_many(tasks)
            await storage.reserve(1)
            with monkeypatch.context() as patch:
                calls = Calls(patch)
                for _ in range(5):
                    assert len(await storage.reserve(1)) == 1
                costs.append((calls.listed, calls.opened))

    assert costs[0] == costs[1]
    assert costs[0][1] <= 5 * 2, "a claim opens the task's file, and the list of paused queues"


async def test_recovery_does_not_list_the_queue_folder_each_time(folder, clock, monkeypatch):
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        await storage.give_back_abandoned()
        listed: list[str] = []
        scan = Disk.scan

        def recording_scan(disk: Disk, where: str) -> list[tuple[str, int]]:
            listed.append(where)
            return scan(disk, where)

        monkeypatch.setattr(Disk, "scan", recording_scan)
        for _ in range(5):
            await storage.give_back_abandoned()
        assert "queue" not in listed
        clock.advance(61)
        await storage.give_back_abandoned()
        assert listed.count("queue") == 1


async def test_concurrent_enqueues_share_a_sync(folder, monkeypatch):
    async with FileStorage(folder, settings=SAFE) as storage:
        calls = Calls(monkeypatch)
        await asyncio.gather(*(storage.enqueue(a_task(f"task-{n}")) for n in range(50)))

    assert calls.synced < 25, "far fewer than one for each task"


# Shared files


async def test_a_batch_is_one_file_with_a_name_for_each_task(folder, clock, monkeypatch):
    async with FileStorage(folder, settings=SAFE, clock=clock) as storage:
        calls = Calls(monkeypatch)
        await storage.enqueue_many(some_tasks("abcdefgh"))
        assert calls.synced == 2, "the file, and the folder of its names"
        assert inodes(folder, "queue", "abcdefgh", "task") == 1

        tasks = await storage.reserve(8)
        calls.synced = 0
        await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in tasks])
        assert calls.synced == 3, "the file, and two folders"

    assert inodes(folder, "results", "abcdefgh", "result") == 1
    assert names(folder, "queue") == names(folder, "tmp") == []


async def test_large_records_are_in_separate_files(storage, folder):
    await storage.enqueue_many(some_tasks("abc", args=["large" * 4000]))

    assert inodes(folder, "queue", "abc", "task") == 3
    assert [task.args for task in await storage.reserve(3)] == [("large" * 4000,)] * 3


async def test_a_change_of_one_task_of_a_shared_file_does_not_affect_the_others(
    storage, folder, clock
):
    ids = [f"task-{number}" for number in range(100)]
    await storage.enqueue_many([a_task(task_id, max_retries=1) for task_id in ids])
    assert inodes(folder, "queue", ids, "task") < 10
    held = {task.id: task for task in await storage.reserve(100)}
    assert list(held) == ids
    await storage.cancel("task-1")
    await storage.record(
        [
            Succeeded("task-0", 1, a_result(held["task-0"])),
            Failed("task-2", 1, an_error()),
            Released("task-3", 1),
        ]
    )

    assert (await storage.get_result("task-0")).status is TaskStatus.SUCCESS
    assert (await storage.get_dead("task-2")).task_id == "task-2"
    assert [task.id for task in await storage.reserve(5)] == ["task-3"]
    assert await storage.delete_task("task-0")
    assert await storage.get_result("task-0") is None
    assert await storage.retry_dead("task-2")
    assert len(await storage.list_tasks(limit=200)) == 99


async def test_tasks_in_a_shared_file_of_another_storage_are_claimed_and_counted(
    storage, another, folder
):
    await another.enqueue_many(some_tasks("abc"))

    assert (await storage.stats()).by_status[TaskStatus.PENDING] == 3
    assert [task.id for task in await storage.reserve(2)] == ["a", "b"]
    assert [task.id for task in await another.reserve(2)] == ["c"]


async def test_a_shared_file_is_read_once(folder, clock, monkeypatch):
    ids = [f"task-{number}" for number in range(400)]
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        await storage.enqueue_many([a_task(task_id) for task_id in ids])
        files = inodes(folder, "queue", ids, "task")
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        calls = Calls(monkeypatch)
        held = await storage.reserve(1)
        assert calls.opened < files + 20
        held += await storage.reserve(400)
        await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in held])
        files = inodes(folder, "results", ids, "result")
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        calls.opened = 0
        assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 400
        assert calls.opened < files + 20


def test_a_name_whose_file_has_changed_since_the_listing_is_read_again(folder):
    disk = Disk(folder, is_durable=False, nonce_prefix="s")
    disk.open()
    ((_, both),) = pack([("a", b"record of a"), ("b", b"record of b")])
    disk.write("tmp/a", both)
    disk.write("tmp/c", b"record of c, alone in its file")
    listed = ListedRecords(disk)
    (inode, _) = disk.read_file("tmp/a") or (0, b"")

    assert listed.read("tmp/a", "a", inode) == b"record of a"
    assert listed.read("tmp/gone", "b", inode) == b"record of b", "cached from the same file"
    assert listed.read("tmp/c", "c", inode) == b"record of c, alone in its file"
    assert listed.read("tmp/gone", "c", inode) is None
    (inode, _) = disk.read_file("tmp/c") or (0, b"")
    assert listed.read("tmp/a", "b", inode) == b"record of b", "a file of one task is not cached"
    disk.close()


def inodes(folder: Path, where: str, ids: Iterable[str], ending: str) -> int:
    """The number of files that these names belong to."""
    return len({os.stat(folder / where / f"{task_id}.{ending}").st_ino for task_id in ids})


# Wake-ups, and what happens without them


def inotify_queue_size() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


async def test_a_task_enqueued_by_another_storage_ends_the_wait(storage, another):
    await storage.reserve(1)
    waiting = asyncio.create_task(storage.wait_for_work(3600))
    await another.enqueue(a_task("a"))

    await asyncio.wait_for(waiting, 5)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_task_is_lost_when_inotify_overflows(storage, another):
    limit = inotify_queue_size()
    if limit > 20_000:
        pytest.skip("the inotify queue of this system is too large to overflow in a test")
    assert await storage.reserve(1) == []
    for _ in range(0, limit + 1000, 1000):
        await another.enqueue_many([Task(func_path="m.f") for _ in range(1000)])

    claimed = 0
    while tasks := await storage.reserve(1000):
        claimed += len(tasks)
    assert claimed >= limit


async def test_changes_by_other_storages_are_seen_without_inotify(folder, clock, monkeypatch):
    monkeypatch.setattr(FolderWatch, "open", classmethod(lambda cls, folder: None))
    async with (
        FileStorage(folder, settings=FAST, clock=clock) as one,
        FileStorage(folder, settings=FAST, clock=clock) as two,
    ):
        assert await one.reserve(1) == []
        await two.enqueue_many(some_tasks("abc"))
        (task,) = await one.reserve(1)
        with pytest.raises(DuplicateTask):
            await two.enqueue(a_task("a"))
        later = clock.now() + timedelta(hours=1)
        await one.record([Retried("a", task.token, an_error(), later)])

        assert [task.id for task in await two.reserve(5)] == ["b", "c"]
        clock.advance(timedelta(hours=2))
        await two.renew()
        assert [task.id for task in await two.reserve(5)] == ["a"]


async def test_the_url_names_folder_and_durability(tmp_path):
    async with open_storage(f"file:{tmp_path}/tasks?durability=os") as storage:
        assert storage.capabilities.durability == "os"
        await storage.enqueue(a_task("a"))

    assert (tmp_path / "tasks" / "queue" / "a.task").is_file()


async def test_a_task_that_another_storage_claims_during_the_check_of_its_limit_stays_known(
    storage, another, monkeypatch
):
    """The check of the limit shows that the task is held: it must not be put back as waiting."""
    task = a_task(limits=(Limit(key="one", max_running=1),))
    await storage.enqueue(task)
    loop, gates = asyncio.get_running_loop(), storage._store.gates
    blocking, taken = gates.blocking, list[Task]()

    def claim_elsewhere_first(gates, now):
        if not taken:
            taken.extend(asyncio.run_coroutine_threadsafe(another.reserve(1), loop).result())
        return blocking(gates, now)

    monkeypatch.setattr(gates, "blocking", claim_elsewhere_first)
    assert await storage.reserve(1) == []

    assert [each.id for each in taken] == [task.id]
    found = await storage.get_task(task.id)
    assert found is not None
    assert (found.status, found.owner) == (TaskStatus.RUNNING, another.owner)
    assert await storage.reserve(1) == []


async def test_a_task_that_was_counted_before_the_wait_still_ends_it(storage, another):
    assert await storage.reserve(1) == []
    await another.enqueue(a_task())
    await storage.stats()

    # In real time: if the wait did not end, the test would time out.
    await storage.wait_for_work(3600)
    assert len(await storage.reserve(1)) == 1


async def test_a_task_that_is_counted_during_the_wait_still_ends_it(storage, another):
    assert await storage.reserve(1) == []
    for _ in range(20):
        waiting = asyncio.ensure_future(storage.wait_for_work(3600))
        await until(lambda: storage._waiting)
        # The count and the waiter race to read the event of the new task.
        await asyncio.gather(another.enqueue(a_task()), *(storage.stats() for _ in range(5)))
        await waiting
        assert len(await storage.reserve(1)) == 1


async def test_a_task_with_a_done_file_left_is_put_back_into_the_index(
    storage, another, clock, no_failpoints
):
    """A claim that takes it out of the index, and finds it not due yet, must put it back."""
    task = a_task()
    await storage.enqueue(task)
    (claimed,) = await another.reserve(1)
    failpoints.configure("file.record.before_clear=raise:EIO@1")
    with pytest.raises(StorageError):
        await another.record(
            [Released(claimed.id, claimed.token, eta=clock.now() + timedelta(seconds=5))]
        )
    failpoints.reset()
    clock.advance(9)

    assert await storage.reserve(1, now=clock.now() - timedelta(seconds=6)) == []
    assert [each.id for each in await storage.reserve(1)] == [task.id]


# Counts and lists while tasks change state


def record_after_the_results_were_listed(storage, another, monkeypatch, outcomes):
    """Have `another` record an outcome each time `storage` has listed the results."""
    loop, disk = asyncio.get_running_loop(), storage._store.disk
    scan, left = disk.scan, list(outcomes)

    def scan_then_record(folder):
        found = scan(folder)
        if folder == "results" and left:
            asyncio.run_coroutine_threadsafe(another.record([left.pop()]), loop).result()
        return found

    monkeypatch.setattr(disk, "scan", scan_then_record)


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_task_that_changes_state_during_a_read_is_counted_and_listed_once(
    storage, another, monkeypatch, is_over
):
    await storage.enqueue_many(some_tasks("abcde"))
    claimed = await another.reserve(5)
    outcomes = [
        Succeeded(task.id, task.token, a_result(task)) if is_over else Released(task.id, task.token)
        for task in claimed
    ]
    record_after_the_results_were_listed(storage, another, monkeypatch, outcomes)

    for moved in (1, 3):
        counted = await storage.stats()
        assert sum(counted.by_status.values()) == 5
        assert counted.by_status[TaskStatus.SUCCESS] == (moved if is_over else 0)
        listed = await storage.list_tasks()
        assert [task.id for task in listed] == list("abcde")


# Cancelled at the moment of the claim


def cancel_at_the_claim(monkeypatch, folder):
    """Cancel as another process does, right after the rename that claims the task."""

    def cancel(name):
        if name == "file.claim.after_rename":
            (running,) = (folder / "queue").glob("*.running")
            running.rename(running.with_suffix(".cancelling"))

    monkeypatch.setattr("omniq.storage.file.claim.hit", cancel)


@pytest.mark.parametrize("options", [{}, {"limits": (Limit(key="k", max_running=1),)}])
async def test_a_task_that_is_cancelled_at_the_moment_of_its_claim_ends(
    storage, another, folder, monkeypatch, options
):
    await another.enqueue(a_task("a", **options))
    cancel_at_the_claim(monkeypatch, folder)

    assert await storage.reserve(1) == []

    ended = await another.get_result("a")
    assert (ended and ended.status) is TaskStatus.CANCELLED
    assert names(folder, "queue") == []
    # It must not occupy the gate any more.
    monkeypatch.undo()
    await another.enqueue(a_task("b", **options))
    assert [task.id for task in await storage.reserve(1)] == ["b"]


async def test_a_claim_that_is_undone_ends_the_task_if_it_was_cancelled_meanwhile(
    storage, another, folder, monkeypatch
):
    await storage.enqueue(a_task("a"))
    real = storage._store.claimer._task_files.read_just_claimed

    def read(claimed):
        live = real(claimed)
        if live is not None and not claimed.is_cancelled:
            # Not due yet, and cancelled before it could be put back.
            live.row.visible = 2**62
            (folder / claimed.path).rename(folder / claimed.cancelled().path)
        return live

    monkeypatch.setattr(storage._store.claimer._task_files, "read_just_claimed", read)

    assert await storage.reserve(1) == []

    ended = await another.get_result("a")
    assert (ended and ended.status) is TaskStatus.CANCELLED
