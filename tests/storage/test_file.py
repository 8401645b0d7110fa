"""What the file backend guarantees beyond the contract: names, modes, races, costs."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from omniq import failpoints
from omniq.errors import DuplicateTask, LeaseLost, StorageError
from omniq.models import BreakerRule, Limit, Task, TaskStatus
from omniq.outcomes import Failed, Released, Retried, Succeeded
from omniq.settings import Settings
from omniq.storage import open_storage, row_rules, tables
from omniq.storage.backend import (
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    Wanted,
    complete,
)
from omniq.storage.file import FileStorage, filesystem
from omniq.storage.file.file_names import DocumentName
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.section import FileSection
from omniq.storage.file.wakeups import FolderWatch
from omniq.storage.file.writes import Change, Write, Writes
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
    """The names in a folder, without the document that every store has."""
    return sorted(name for name in os.listdir(folder / of) if not name.startswith("store~"))


# Files


async def test_a_task_is_a_file_that_is_renamed_through_its_life(storage, folder):
    await storage.enqueue(a_task("a"))
    (waiting,) = names(folder, "tasks")
    assert waiting.startswith("a.")
    assert waiting.endswith(".0.task")

    (task,) = await storage.reserve(1)
    (running,) = names(folder, "tasks")
    assert running.startswith(waiting.removesuffix("0.task") + f"1.1.{storage.owner}.")
    assert running.endswith(".running")

    await storage.mark_done("a", a_result(task))
    assert names(folder, "tasks") == []
    assert names(folder, "results") == ["a.result"]


async def test_a_final_failure_leaves_a_result_and_a_dead_letter(storage, folder):
    await storage.enqueue(a_task("a"))
    await storage.reserve(1)
    await storage.mark_failed("a", an_error(), will_retry=False)

    assert names(folder, "tasks") == []
    assert names(folder, "results") == ["a.result"]
    assert names(folder, "dead") == ["a.dead"]


@pytest.mark.parametrize(
    "task_id",
    [
        "a.b",
        "a.task",
        "a.1.W.2.running",
        "a.1.N.done",
        "a.b-1.0.task.c-2.old",
        "a.result",
        "-.-",
        "_",
        "v1..2",
        "x" * 128,
    ],
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
    assert names(folder, "tasks") == []


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

    assert names(folder, "tmp") == names(folder, "parts") == []
    assert names(folder, "tasks") == []


# Several processes and storages


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("durability", ["os", pytest.param("power", marks=pytest.mark.deep)])
@pytest.mark.fault("F25")
async def test_eight_processes_drain_one_folder_and_claim_each_task_once(folder, durability):
    url = f"file:{folder}?durability={durability}"
    drained = await drain_together(url, processes=8, tasks=2000 if durability == "os" else 1000)

    assert drained.errors == ""
    assert set(drained.claims.values()) == {1}
    assert len(drained.claims) == (2000 if durability == "os" else 1000)
    assert drained.refused == 0
    assert names(folder, "tasks") == []


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


async def test_a_task_leaves_its_gate_in_the_step_that_records_its_outcome(
    storage, another, no_failpoints
):
    """Also when the process dies in the middle of that step: the next one finishes all of it."""
    only_one = (Limit(key="k", max_running=1),)
    await storage.enqueue_many(some_tasks("ab", limits=only_one))
    (first,) = await storage.reserve(2)
    failpoints.configure("file.record.after_commit=raise:EIO")
    with pytest.raises(StorageError):
        await storage.mark_done("a", a_result(first))
    failpoints.reset()

    await another.give_back_abandoned()
    (second,) = await another.reserve(2)

    assert (first.id, second.id) == ("a", "b")
    assert (await another.gates())["running:k"].holders == [("b", 1)]


ONE = (Limit(key="k", max_running=1),)


async def test_a_task_is_not_parked_under_a_gate_that_others_empty_meanwhile(
    storage, another, monkeypatch
):
    """Nothing would offer the task again."""
    await storage.enqueue_many(some_tasks("ab", limits=ONE))
    (first,) = await another.reserve(2)
    await storage.enqueue(a_task("c", limits=ONE))
    loop, commit = asyncio.get_running_loop(), Writes.commit

    async def empty_the_gate() -> None:
        await another.mark_done("a", a_result(first))
        (second,) = await another.reserve(1)
        await another.mark_done("b", a_result(second))

    def delayed(self, write, is_occupied):
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(empty_the_gate(), loop).result()
        commit(self, write, is_occupied)

    monkeypatch.setattr(Writes, "commit", delayed)
    claimed = [*await storage.reserve(5), *await another.reserve(5)]

    assert [task.id for task in claimed] == ["c"]


async def test_a_gate_finds_the_tasks_that_an_unfinished_write_parks(
    storage, another, no_failpoints
):
    """The write has been committed, and its process died after it had changed the gate."""
    await storage.enqueue(a_task("a", limits=ONE))
    (first,) = await another.reserve(1)
    await storage.enqueue(a_task("b", limits=ONE))
    failpoints.configure("file.requeue.after_task=raise:EIO")
    with pytest.raises(StorageError):
        await storage.reserve(5)
    failpoints.reset()
    await another.mark_done("a", a_result(first))

    assert [task.id for task in await another.reserve(5)] == ["b"]


async def test_a_record_of_the_store_that_is_put_back_beside_a_newer_one_is_removed(
    storage, folder, clock
):
    """A restore under running workers: they raise the epoch before it is complete, and not again."""
    await storage.renew()
    (name,) = [name for name in os.listdir(folder / "tasks") if name.startswith("store~")]
    before = (folder / "tasks" / name).read_bytes()
    raised = await storage.mark_restored()
    with pytest.raises(LeaseLost):
        await storage.renew()
    await storage.renew()
    for is_open in (True, False):
        (folder / "tasks" / name).write_bytes(before)
        if is_open:
            assert await storage.reserve(1) == []
            assert (await storage.renew()).held == {}
        for _ in range(3):
            async with FileStorage(folder, settings=FAST, clock=clock) as another:
                assert (await another.store_record()).epoch == raised
        assert not (folder / "tasks" / name).exists()


async def test_the_sweep_of_leases_leaves_what_a_restoring_program_is_writing(storage, folder):
    leases = folder / "leases"
    drafts = {leases / f".gone.{end}" for end in ("info", "resting", "info.x8Kd2q")}
    old, fresh = leases / "gone.info", leases / "gone.resting"
    for path in (*drafts, old, fresh):
        path.write_bytes(b"half of it")
        if path is not fresh:
            os.utime(path, (1, 1))
    await storage.give_back_abandoned()

    assert all(path.exists() for path in (*drafts, fresh))
    assert not old.exists()


@pytest.mark.parametrize("is_watched", [True, False])
async def test_an_older_name_of_a_task_that_is_put_back_beside_a_newer_one_is_removed(
    storage, another, folder, is_watched
):
    """The newer one is the task: what the restore has put back would hide it until the next listing."""
    await storage.enqueue_many(some_tasks("abc"))
    waiting = {name: (folder / "tasks" / name).read_bytes() for name in names(folder, "tasks")}
    (running, retried, done) = await storage.reserve(3)
    held = {name: (folder / "tasks" / name).read_bytes() for name in names(folder, "tasks")}
    await storage.record([Retried(retried.id, retried.token, an_error(), storage.clock.now())])
    await storage.mark_done(done.id, a_result(done))
    if not is_watched:
        another._backend._store.files.distrust_index()
        storage._backend._store.files.distrust_index()
    for name, data in {**waiting, **held}.items():
        if not name.startswith("c.") and not (folder / "tasks" / name).exists():
            (folder / "tasks" / name).write_bytes(data)

    (again,) = await another.reserve(5)
    assert (again.id, again.token) == ("b", 2)
    assert await storage.record([Succeeded("a", running.token, a_result(running))]) == [True]
    assert await another.record([Succeeded("b", 2, a_result(again))]) == [True]
    assert await storage.reserve(5) == []
    assert names(folder, "tasks") == []


async def test_a_task_that_is_claimed_while_another_process_lists_the_folder_stays(
    storage, another, folder, monkeypatch
):
    """Such a listing may have both names of the file, and the event of the new name follows it."""
    await storage.enqueue(a_task(id="a"))
    await another.reserve(0)
    loop, list_names, claimed = asyncio.get_running_loop(), Disk.names, list[Task]()

    def names_before_and_after_the_claim(disk: Disk, of: str) -> list[str]:
        found = list_names(disk, of)
        if of == "tasks":
            monkeypatch.undo()
            claimed.extend(asyncio.run_coroutine_threadsafe(another.reserve(1), loop).result(30))
            found += list_names(disk, of)
        return found

    monkeypatch.setattr(Disk, "names", names_before_and_after_the_claim)
    storage._backend._store.files.distrust_index()
    assert (await storage.stats()).by_status[TaskStatus.RUNNING] == 1

    (task,) = claimed
    assert await another.record([Succeeded("a", task.token, a_result(task))]) == [True]
    assert names(folder, "results") == ["a.result"]


def test_a_document_that_changes_often_and_is_due_late_takes_no_more_memory():
    """Such as the state of a rate limit with a long span, which each claim changes."""
    documents, in_memory = tables.Documents[DocumentName](), tables.Documents[Document]()
    names = [DocumentName("gate~k", f"c-{number}", 10**9 + number) for number in range(5_000)]
    for name in names:
        documents.put(name)
        in_memory.put(Document("gate", "k", b"", name.due))

    assert len(documents._due) < 2_000
    assert documents.find(DocumentQuery(kind="gate", due_by=2 * 10**9)) == names[-1:]
    assert len(in_memory._due) < 2_000
    (found,) = in_memory.find(DocumentQuery(kind="gate", due_by=2 * 10**9))
    assert found.due == names[-1].due


# Unfinished work of processes that died


@pytest.mark.fault("F60")
@pytest.mark.parametrize("ids", ["a", "abc"], ids=["one task", "a batch"])
async def test_an_enqueue_of_a_dead_process_is_undone_before_its_commit(
    ids, folder, clock, monkeypatch
):
    """The state after its process has died before the last step, long ago."""
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        monkeypatch.setattr(Writes, "_undo", lambda self, write, changes: None)
        failpoints.configure("file.enqueue.before_publish=raise:EIO")
        with pytest.raises(StorageError):
            await storage.enqueue_many(some_tasks(ids))
        failpoints.reset()
        monkeypatch.undo()
    assert len(names(folder, "tasks")) >= len(ids)
    for name in names(folder, "tasks"):
        os.utime(folder / "tasks" / name, (0, 0))

    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        await storage.give_back_abandoned()
        assert names(folder, "tasks") == []
        assert await storage.enqueue_many(some_tasks(ids)) == list(ids)


@pytest.mark.fault("F60")
async def test_a_batch_of_a_dead_process_is_enqueued_completely_after_its_commit(
    folder, clock, monkeypatch
):
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        monkeypatch.setattr(Writes, "_apply", lambda self, changes: None)
        monkeypatch.setattr(Writes, "flush", lambda self: None)
        await storage.enqueue_many(some_tasks("abc"))
        monkeypatch.undo()
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        assert await storage.get_task("b") is not None
        await storage.give_back_abandoned()
        assert [task.id for task in await storage.reserve(5)] == ["a", "b", "c"]
    assert not any(name.endswith((".new", ".done")) for name in names(folder, "tasks"))


@pytest.mark.fault("F60")
@pytest.mark.parametrize("published", [1, 2])
async def test_a_committed_batch_is_finished_by_its_repeat_also_when_the_folder_could_not_be_listed(
    published, storage, no_failpoints
):
    tasks = some_tasks("abc")
    failpoints.configure(
        f"file.enqueue.after_publish=raise:EIO@{published},file.index.before_listing=raise:EIO"
    )
    for _ in range(2):
        with pytest.raises(StorageError):
            await storage.enqueue_many(tasks, nonce="n")
    failpoints.reset()

    assert await storage.enqueue_many(tasks, nonce="n") == ["a", "b", "c"]
    assert [task.id for task in await storage.reserve(5)] == ["a", "b", "c"]
    assert await storage.reserve(5) == []


async def test_a_breaker_learns_of_an_outcome_in_the_step_that_records_it(
    storage, another, clock, no_failpoints
):
    """Also when the process dies in the middle of that step: nobody enters in between."""
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
    clock.advance(4.999)
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


@pytest.mark.fault("F27")
async def test_a_write_whose_process_is_suspended_is_undone_by_another_and_made_again(
    storage, another, monkeypatch
):
    """Suspended right before its commit. No lock outlives its owner, and none is needed."""
    await storage.enqueue_many(some_tasks("ab", limits=(Limit(key="k", max_running=1),)))
    (task,) = await storage.reserve(2)
    loop, decide, calls = asyncio.get_running_loop(), Writes._decide, list[Write]()

    def suspended(writes, write):
        calls.append(write)
        if len(calls) == 1:
            assert asyncio.run_coroutine_threadsafe(another.cancel("a"), loop).result()
        decide(writes, write)

    monkeypatch.setattr(Writes, "_decide", suspended)
    assert await storage.record([Released("a", task.token)]) == [True]

    ended = await another.get_result("a")
    assert (ended and ended.status) is TaskStatus.CANCELLED
    assert [task.id for task in await another.reserve(5)] == ["b"]


async def test_a_write_that_is_committed_while_another_process_ends_it_is_finished_completely(
    storage, another, folder, monkeypatch
):
    """Else what is left of it has no marker any more, and a third process would undo it."""
    await storage.enqueue_many(some_tasks("ab"))
    claimed = await storage.reserve(2)
    take, apply = Writes._take, Writes._apply
    other = another._backend._store
    results: list[list[str]] = []

    def take_and_be_seen(self: Writes, write: Write, each: Change) -> None:
        take(self, write, each)
        if each.key == "a":
            other.files.refresh()

    def apply_too_late(self: Writes, changes: Iterable[Change]) -> None:
        monkeypatch.undo()
        (write,) = other.files.index.writes
        other.writes._end(write)
        results.append(names(folder, "results"))
        apply(self, changes)

    monkeypatch.setattr(Writes, "_take", take_and_be_seen)
    monkeypatch.setattr(Writes, "_apply", apply_too_late)
    recorded = await storage.record(
        [Succeeded(task.id, task.token, a_result(task)) for task in claimed]
    )

    assert recorded == [True, True]
    assert results == [["a.result", "b.result"]]
    assert names(folder, "tasks") == names(folder, "parts") == []


async def test_a_dead_task_that_ends_again_before_its_retry_returns_keeps_the_new_result(
    storage, another, clock, folder, monkeypatch
):
    """The retry removes the record of the failure after its commit, when others may run the task."""
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await storage.record([Failed("a", task.token, an_error())])
    clock.advance(1)
    loop, apply = asyncio.get_running_loop(), Writes._apply

    async def run_again() -> None:
        (task,) = await another.reserve(1)
        assert await another.record([Succeeded("a", task.token, a_result(task, "new"))]) == [True]

    def apply_and_be_slow(self: Writes, changes: Iterable[Change]) -> None:
        monkeypatch.undo()
        apply(self, changes)
        asyncio.run_coroutine_threadsafe(run_again(), loop).result(30)

    monkeypatch.setattr(Writes, "_apply", apply_and_be_slow)
    assert await storage.retry_dead("a")

    assert (await storage.get_result("a")).result == "new"
    assert names(folder, "dead") == names(folder, "tmp") == []


async def test_a_late_retry_of_a_task_that_was_retried_and_died_again_reads_the_new_letter(
    storage, another, monkeypatch
):
    """With the row of the first letter, the next claim would have the token of an earlier one."""
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await storage.record([Failed("a", task.token, an_error())])
    loop, prepare = asyncio.get_running_loop(), Writes._prepare

    async def retry_and_fail() -> None:
        assert await another.retry_dead("a")
        (task,) = await another.reserve(1)
        assert await another.record([Failed("a", task.token, an_error())]) == [True]

    def prepare_late(self: Writes, write: Write) -> None:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(retry_and_fail(), loop).result(30)
        prepare(self, write)

    monkeypatch.setattr(Writes, "_prepare", prepare_late)
    assert await storage.retry_dead("a")

    assert [task.token for task in await storage.reserve(1)] == [3]


async def test_a_purge_that_has_read_an_old_letter_keeps_the_new_one_of_the_same_task(
    storage, another, clock, folder, monkeypatch
):
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await storage.record([Failed("a", task.token, an_error())])
    clock.advance(60)
    older_than = clock.now()
    loop, write = asyncio.get_running_loop(), FileSection.write

    async def retry_and_fail() -> None:
        assert await another.retry_dead("a")
        (task,) = await another.reserve(1)
        assert await another.record([Failed("a", task.token, an_error("again"))]) == [True]

    async def write_late(self: FileSection, changes: Changes) -> frozenset[str]:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(retry_and_fail(), loop).result(30)
        return await write(self, changes)

    monkeypatch.setattr(FileSection, "write", write_late)
    await storage.purge_dead(older_than)

    assert names(folder, "dead") == ["a.dead"]
    assert names(folder, "tmp") == []


@pytest.mark.parametrize("checked", [[], ["a"]])
async def test_a_large_rate_limit_whose_process_died_after_the_commit_is_finished_by_another(
    storage, another, folder, checked, no_failpoints
):
    """It has more bytes than other files may have; with a task beside it, so has the marker of the write."""
    await storage.enqueue(a_task("a"))
    store, other = storage._backend._store, another._backend._store
    before, after = b"1" * 5_000_000, b"2" * 5_000_000
    added = DocumentChange("gate", "rate:x", None, before)
    complete(store.section().write(Changes(documents=[added])))
    store.writes.flush()

    section = store.section()
    rows = [record.row for record in complete(section.load(checked)).values()]
    changed = DocumentChange("gate", "rate:x", before, after)
    failpoints.configure("file.record.after_commit=raise:EIO@1")
    with pytest.raises(OSError, match="failpoint"):
        complete(section.write(Changes(documents=[changed], checked=rows)))
    found = complete(other.section().documents("gate", ["rate:x"]))

    assert found["rate:x"].data == after
    assert names(folder, "corrupt") == []
    assert [name.split(".")[2] for name in names(folder, "tasks") if name.endswith(".task")] == [
        str(len(checked))
    ]


async def test_a_retry_that_is_undone_keeps_the_letter_beside_a_task_whose_id_is_its_name(
    storage, folder, monkeypatch
):
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await storage.record([Failed("a", task.token, an_error())])
    await storage.enqueue(a_task("a.dead"))
    decide = Writes._decide

    def decide_too_late(self: Writes, write: Write) -> None:
        monkeypatch.undo()
        os.remove(folder / "tasks" / f"{write.nonce}.open")
        decide(self, write)

    monkeypatch.setattr(Writes, "_decide", decide_too_late)

    assert await storage.retry_dead("a")
    assert {task.id for task in await storage.reserve(2)} == {"a", "a.dead"}


async def test_a_long_write_is_not_undone_while_it_makes_progress(storage, another, monkeypatch):
    """Else a worker that records thousands of outcomes beside a reader would begin again, for ever."""
    ids = [f"{number:03}" for number in range(100)]
    await storage.enqueue_many(some_tasks(ids))
    claimed = await storage.reserve(100)
    take, undo, taken, undone = Writes._take, Writes._undo, [], []

    def take_slowly(self: Writes, write: Write, each: Change) -> None:
        take(self, write, each)
        taken.append(each.key)
        time.sleep(0.003)

    def count(self: Writes, write: str, changes: Iterable[Change]) -> None:
        undone.append(write)
        undo(self, write, changes)

    monkeypatch.setattr(Writes, "_take", take_slowly)
    monkeypatch.setattr(Writes, "_undo", count)
    outcomes = [Succeeded(task.id, task.token, a_result(task)) for task in claimed]
    recording = asyncio.create_task(storage.record(outcomes))
    await until(lambda: taken != [])
    assert (await another.get_task(ids[0])).status is TaskStatus.SUCCESS

    assert all(await recording)
    assert undone == []


async def test_a_result_that_is_replaced_while_the_earlier_one_is_read_is_not_taken_for_damaged(
    storage, another, folder, monkeypatch
):
    """The earlier one is overwritten when it is deleted: its reader finds no record."""
    await storage.enqueue_many(some_tasks("ab"))
    failed = [Failed(task.id, task.token, an_error()) for task in await storage.reserve(2)]
    await storage.record(failed)
    loop, read_whole = asyncio.get_running_loop(), filesystem._read_whole

    async def run_again() -> None:
        assert [await another.retry_dead(task_id) for task_id in "ab"] == [True, True]
        outcomes = [
            Succeeded(task.id, task.token, a_result(task)) for task in await another.reserve(2)
        ]
        assert await another.record(outcomes) == [True, True]

    def read_late(fd: int, size: int) -> bytes:
        monkeypatch.undo()
        asyncio.run_coroutine_threadsafe(run_again(), loop).result(30)
        return read_whole(fd, size)

    monkeypatch.setattr(filesystem, "_read_whole", read_late)
    assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 2

    assert names(folder, "results") == ["a.result", "b.result"]
    assert names(folder, "corrupt") == []


async def test_a_part_stays_while_a_suspended_process_may_still_commit_it(
    storage, another, folder, monkeypatch
):
    """Else a process that is resumed after hours records the outcome, and the result is lost."""
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    take, other = Writes._take, another._backend._store

    def take_hours_later(self: Writes, write: Write, each: Change) -> None:
        make_parts_old(folder)
        other.files.refresh()
        other.finished.remove_leftovers()
        take(self, write, each)

    monkeypatch.setattr(Writes, "_take", take_hours_later)
    assert await storage.record([Succeeded("a", task.token, a_result(task))]) == [True]

    assert names(folder, "results") == ["a.result"]


async def test_an_old_part_that_no_write_needs_is_removed(storage, folder):
    await storage.enqueue(a_task("a"))
    write = storage._backend._store.disk.nonce()
    (folder / "parts" / f"gone.{write}.part").touch()
    (folder / "parts" / "a.0000earlier-1.part").touch()
    (folder / "parts" / f"a.{write}.part").touch()
    make_parts_old(folder)
    await storage.purge_expired()

    assert names(folder, "parts") == [f"a.{write}.part"]


def make_parts_old(folder: Path) -> None:
    """Make the parts as old as those of a process that was suspended for two hours."""
    for part in (folder / "parts").iterdir():
        os.utime(part, (time.time() - 7200,) * 2)


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
    assert names(folder, "tasks") == names(folder, "tmp") == names(folder, "parts") == []
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

        assert names(folder, "tasks") == names(folder, "tmp") == names(folder, "parts") == []
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
    assert costs[0][1] <= 5, "a claim opens the task's file"


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
        assert "tasks" not in listed
        clock.advance(61)
        await storage.give_back_abandoned()
        assert listed.count("tasks") == 1


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
        assert inodes(folder, "tasks", "abcdefgh") == 1

        tasks = await storage.reserve(8)
        calls.synced = 0
        await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in tasks])
        assert calls.synced == 3, "the file, and two folders"

    assert inodes(folder, "results", "abcdefgh") == 1
    assert names(folder, "tasks") == names(folder, "tmp") == []


async def test_large_records_are_in_separate_files(storage, folder):
    await storage.enqueue_many(some_tasks("abc", args=["large" * 4000]))

    assert inodes(folder, "tasks", "abc") == 3
    assert [task.args for task in await storage.reserve(3)] == [("large" * 4000,)] * 3


async def test_large_records_and_many_renames_fit_into_one_write(storage, another):
    """Such files are longer than what is read at first."""
    await storage.enqueue_many([a_task(task_id, args=["large" * 40_000]) for task_id in "abc"])
    held = await another.reserve(3)
    assert [task.args for task in held] == [("large" * 40_000,)] * 3
    limits = (Limit(key="k", max_running=1),)
    await storage.enqueue_many([a_task(f"limited-{n:03}", limits=limits) for n in range(900)])
    outcomes = [Succeeded(task.id, task.token, a_result(task, "large" * 40_000)) for task in held]
    recorded, claimed = await another.record_and_reserve(outcomes, 2)

    assert recorded == [True] * 3
    assert [task.id for task in claimed] == ["limited-000"]
    assert [(await storage.get_result(task_id)).result for task_id in "abc"] == [
        "large" * 40_000
    ] * 3
    assert len(await storage.list_tasks(limit=1000)) == 903


async def test_a_change_of_one_task_of_a_shared_file_does_not_affect_the_others(
    storage, folder, clock
):
    ids = [f"task-{number}" for number in range(100)]
    await storage.enqueue_many([a_task(task_id, max_retries=1) for task_id in ids])
    assert inodes(folder, "tasks", ids) < 10
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


async def test_a_file_has_the_record_of_its_task_and_a_file_of_a_batch_those_of_all_its_names(
    storage, folder
):
    """The tasks of one call share files of up to 18 KiB; a larger record has a file alone."""
    task = a_task("alone", args=["arg-alone"])
    await storage.enqueue(task)
    (alone,) = (folder / "tasks" / name for name in names(folder, "tasks"))
    assert alone.stat().st_nlink == 1
    assert storage.serializer.encode_task(task) in alone.read_bytes()

    sizes = {"a": 10, "b": 10, "large": 20_000, "c": 10}
    batch = [a_task(each, args=["x" * size, f"arg-{each}"]) for each, size in sizes.items()]
    await storage.enqueue_many(batch)
    files = {
        name.partition(".")[0]: folder / "tasks" / name
        for name in names(folder, "tasks")
        if name != alone.name
    }
    shared = {each: path.stat().st_ino for each, path in files.items()}

    assert files.keys() == sizes.keys()
    assert all(path.name.endswith(".task") for path in files.values())
    assert shared["a"] == shared["b"]
    assert len({shared["a"], shared["large"], shared["c"]}) == 3
    for each in sizes:
        held = {other for other in sizes if f"arg-{other}".encode() in files[each].read_bytes()}
        assert held == {other for other in sizes if shared[other] == shared[each]}


@pytest.mark.parametrize("retried", [False, True])
async def test_arguments_of_an_ended_task_are_not_left_in_the_file_of_its_batch(
    storage, another, folder, clock, retried
):
    tasks = [
        a_task(task_id, args=[f"secret-{task_id}"], result_ttl=0 if task_id == "b" else 60)
        for task_id in "abc"
    ]
    await storage.enqueue_many(tasks)
    claimed = {task.id: task for task in await storage.reserve(3)}
    if retried:
        outcomes = [Retried(each, 1, an_error(), clock.now()) for each in "ab"]
        await storage.record(outcomes)
        await another.reserve(3)
        await another.record([Succeeded("b", 2, a_result(claimed["b"]))])
    else:
        await storage.mark_done("b", a_result(claimed["b"]))

    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"secret-b" not in stored
    assert b"secret-a" in stored
    assert b"secret-c" in stored
    assert (await another.get_task("a")).args == ("secret-a",)
    assert (await another.get_task("c")).args == ("secret-c",)


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
        files = inodes(folder, "tasks", ids)
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        calls = Calls(monkeypatch)
        held = await storage.reserve(1)
        assert calls.opened < files + 20
        held += await storage.reserve(400)
        await storage.record([Succeeded(task.id, task.token, a_result(task)) for task in held])
        files = inodes(folder, "results", ids)
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        calls.opened = 0
        assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 400
        assert calls.opened < files + 20


def inodes(folder: Path, where: str, ids: Iterable[str]) -> int:
    """The number of files that the names of these tasks belong to."""
    wanted = set(ids)
    entries = [entry for entry in os.scandir(folder / where) if entry.name.split(".")[0] in wanted]
    assert len(entries) == len(wanted)
    return len({entry.inode() for entry in entries})


# Wake-ups, and what happens without them


def inotify_queue_size() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


async def test_a_task_enqueued_by_another_storage_ends_the_wait(storage, another):
    await storage.reserve(1)
    waiting = asyncio.create_task(storage.wait_for_work(3600))
    await another.enqueue(a_task("a"))

    await asyncio.wait_for(waiting, 30)


@pytest.mark.deep
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

    assert list((tmp_path / "tasks" / "tasks").glob("a.*.task"))


async def test_a_task_that_another_storage_claims_during_the_check_of_its_limit_stays_known(
    storage, another, monkeypatch
):
    """The write finds that the task is held: it must not be put back as waiting."""
    task = a_task(limits=(Limit(key="one", max_running=1),))
    await storage.enqueue(task)
    loop, writes = asyncio.get_running_loop(), storage._backend._store.writes
    commit, taken = writes.commit, list[Task]()

    def claim_elsewhere_first(write, is_occupied):
        if not taken:
            taken.extend(asyncio.run_coroutine_threadsafe(another.reserve(1), loop).result())
        return commit(write, is_occupied)

    monkeypatch.setattr(writes, "commit", claim_elsewhere_first)
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
        await until(lambda: storage._backend.waiting)
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
    loop, disk = asyncio.get_running_loop(), storage._backend._store.disk
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


@pytest.mark.parametrize("options", [{}, {"limits": (Limit(key="k", max_running=1),)}])
async def test_a_task_that_is_cancelled_at_the_moment_of_its_claim_ends(
    storage, another, folder, monkeypatch, options
):
    await another.enqueue(a_task("a", **options))
    loop, real = asyncio.get_running_loop(), Writes.flush

    def cancel_first(writes):
        # As another process does, right after the rename that claims the task.
        monkeypatch.setattr(Writes, "flush", real)
        assert asyncio.run_coroutine_threadsafe(another.cancel("a"), loop).result()
        real(writes)

    await storage.renew()
    monkeypatch.setattr(Writes, "flush", cancel_first)
    (task,) = await storage.reserve(1)
    assert (await storage.renew()).cancelled == {"a"}
    assert await storage.record([Released("a", task.token)]) == [True]

    ended = await another.get_result("a")
    assert (ended and ended.status) is TaskStatus.CANCELLED
    assert not [name for name in names(folder, "tasks") if name.startswith("a.")]
    # It must not occupy the gate any more.
    await another.enqueue(a_task("b", **options))
    assert [task.id for task in await storage.reserve(1)] == ["b"]


async def test_claims_that_are_undone_leave_a_task_that_was_cancelled_meanwhile_to_its_owner(
    storage, another
):
    await storage.renew()
    await storage.enqueue_many(some_tasks("ab"))
    store = storage._backend._store
    section = store.section()
    wanted = Wanted(due_by=storage.clock.micros())

    def claim():
        rows = complete(section.candidates(wanted, None, 2))
        for row in rows:
            row_rules.claim(row, storage.owner, section.now)
        complete(section.write(Changes(claimed=rows)))

    await storage._backend._run(lambda _: claim())
    assert await another.cancel("a")
    await storage._backend._run(lambda store: store.undo_claims(section))

    assert await storage.held_by(storage.owner) == {"a": 1}
    assert [(task.id, task.token) for task in await another.reserve(2)] == [("b", 1)]
    assert await storage.record([Released("a", 1)]) == [True]
    ended = await another.get_result("a")
    assert (ended and ended.status) is TaskStatus.CANCELLED


async def test_a_large_batch_on_a_slow_disk_is_not_taken_for_one_of_a_process_that_died(
    storage, another, monkeypatch
):
    link, announce, tries, linked = Disk.link, Writes._announce, [], []

    def slow_link(disk: Disk, source: str, target: str) -> bool:
        if target.endswith(".new"):
            time.sleep(0.002)
            linked.append(time.monotonic())
        return link(disk, source, target)

    def counted(*arguments: Any) -> None:
        tries.append(1)
        announce(*arguments)

    monkeypatch.setattr(Disk, "link", slow_link)
    monkeypatch.setattr(Writes, "_announce", counted)
    async with asyncio.TaskGroup() as group:
        enqueue = group.create_task(storage.enqueue_many([a_task() for _ in range(1_500)]))
        while not enqueue.done():
            await another.give_back_abandoned()
            await asyncio.sleep(0.1)

    assert len(enqueue.result()) == 1_500
    # On a busy machine its thread may stand still for so long that it is rightly taken for dead.
    longest_pause = max(later - earlier for earlier, later in pairwise(linked))
    assert len(tries) == 1 or longest_pause > 1


async def test_a_worker_is_listed_when_its_first_renewal_is_complete(tmp_path):
    async with (
        FileStorage(tmp_path / "store") as storage,
        FileStorage(tmp_path / "store") as reader,
    ):
        await storage.renew(concurrency=1)
        assert [worker.pid for worker in await reader.workers()] == [os.getpid()]

        # The lease is stored before what the worker says of itself.
        (record,) = (tmp_path / "store").rglob(f"{storage.owner}.info")
        record.unlink()
        assert await reader.workers() == []

        await storage.renew(concurrency=1)
        assert [worker.pid for worker in await reader.workers()] == [os.getpid()]
