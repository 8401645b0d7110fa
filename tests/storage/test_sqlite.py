"""What the SQLite backend guarantees beyond the contract: plans, processes, locks, files, disk."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import pytest

from omniq import TaskQueue, failpoints
from omniq.clock import to_micros
from omniq.errors import DuplicateTask, LeaseLost, StorageCorrupt, StorageError
from omniq.models import Task, TaskError, TaskResult, TaskStatus
from omniq.outcomes import Failed, Released, Succeeded
from omniq.settings import Settings
from omniq.storage.inspection import DeadQuery
from omniq.storage.sqlite import (
    SQLiteStorage,
    connection,
    lanes,
    leases,
    queries,
    section,
    tables,
)
from omniq.storage.sqlite.backend import SQLiteBackend
from omniq.storage.sqlite.connection import statement
from omniq.testing.clock import ManualClock
from tests.storage.drain_together import drain_together

ROOT = Path(__file__).parents[2]
QUICK = Settings(durability="os")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tasks.db"


@pytest.fixture
async def storage(path):
    async with SQLiteStorage(path, settings=QUICK) as storage:
        yield storage


@pytest.fixture(autouse=True)
def _no_failpoints():
    yield
    failpoints.reset()


@contextmanager
def hold_write_lock(path):
    """Hold the write lock, as another process in a long transaction does."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield other
    finally:
        if other.in_transaction:
            other.execute("ROLLBACK")
        other.close()


def some(count, **options):
    return [Task(func_path="m.f", args=(number,), **options) for number in range(count)]


def done(task):
    result = TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, attempts=1)
    return Succeeded(task.id, task.token, result)


# Query plans


def plan(db, sql):
    arrays = ("queues", "seqs", "ids", "lanes", "places", "ranges", "owners", "keys", "claims")
    names = re.findall(r":(\w+)", sql)
    parameters = {name: "[]" if name in arrays else 1 for name in names}
    db.create_function("omniq_largest", 0, int)
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]


def claim_statements():
    for by_queue in (False, True):
        yield lanes._statement("lanes", by_queue)
        yield lanes._statement("positions", by_queue)
        yield lanes._statement("lane_rows", by_queue)
    for name in ("load", "held", "parked", "live_rows"):
        yield tables.rows_statement(name, bodies=False)
    names = "claim_facts promote claim move still_held holders queues held_ids"
    for name in (*names.split(), "delete_documents", "delete_if_equal"):
        yield statement(name)


async def test_no_statement_of_a_claim_scans_a_table_or_sorts(storage, path):
    await storage.reserve(1, queues=["mail"])
    db = sqlite3.connect(path)
    steps = [(sql, step) for sql in claim_statements() for step in plan(db, sql)]
    db.close()

    scans = [(sql, step) for sql, step in steps if step.startswith("SCAN omniq_") or "TEMP" in step]
    scans += [
        (sql, step)
        for sql, step in steps
        for table in ("live", "next", "head", "tasks", "functions", "dead", "finished", "found")
        if step.startswith(f"SCAN {table} ") or step == f"SCAN {table}"
        # The result of a subquery, which is in the plan too.
        if (sql, f"CO-ROUTINE {table}") not in steps
    ]

    assert len(steps) > 40
    assert scans == []


async def test_dead_letters_are_found_by_the_time_of_their_failure_without_reading_the_others(path):
    """A hundred old letters and a new one: SQLite finds it by an index on the time."""
    clock = ManualClock()
    async with SQLiteStorage(path, clock=clock, settings=QUICK) as storage:
        for failing in (100, 1):
            clock.advance(timedelta(hours=1))
            await storage.enqueue_many(some(failing, max_retries=0))
            outcomes = [
                Failed(task.id, task.token, TaskError("boom"), "exhausted")
                for task in await storage.reserve(failing)
            ]
            await storage.record(outcomes)
        since = clock.now()
        (letter,) = await storage.list_dead(since=since)
    with closing(sqlite3.connect(path)) as db:
        db.create_function("omniq_largest", 0, lambda: 1 << 20)
        sqls: list[str] = []
        db.set_trace_callback(sqls.append)
        found = queries.list_dead(db, DeadQuery(since=to_micros(since)))
        db.set_trace_callback(None)
        steps = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sqls[0]}")]

    assert len(found) == 1
    assert letter.last_failure == since
    assert any("omniq_dead_failure (last_failure>?" in step for step in steps)


@pytest.mark.fault("F96")
async def test_priority_decides_when_more_tasks_come_due_than_one_transaction_moves(path):
    clock = ManualClock()
    late = clock.now() + timedelta(hours=1)
    count = section.PROMOTE_BATCH * 2 + 1
    async with SQLiteStorage(path, clock=clock, settings=QUICK) as storage:
        await storage.enqueue_many(some(count, eta=late))
        await storage.enqueue(Task(id="urgent", func_path="m.f", eta=late, priority=1))
        clock.advance(timedelta(hours=2))

        first = await storage.reserve(1)

    assert [task.id for task in first] == ["urgent"]


async def test_tasks_of_many_queues_are_claimed_in_one_order(storage):
    tasks = [
        Task(id=f"t{number}", func_path="m.f", queue=f"q{number % 40}", priority=number % 7)
        for number in range(200)
    ]
    await storage.enqueue_many(tasks)

    claimed = [task.id for _ in range(4) for task in await storage.reserve(50)]

    expected = sorted(range(200), key=lambda number: (-(number % 7), number))
    assert claimed == [f"t{number}" for number in expected]


# Batches


async def test_concurrent_jobs_share_one_transaction_and_fail_alone(storage):
    await storage.enqueue(Task(id="taken", func_path="m.f"))
    failpoints.configure("sqlite.before_commit=count")

    tasks = [Task(id="taken" if n == 50 else f"t{n}", func_path="m.f") for n in range(100)]
    answers = await asyncio.gather(*map(storage.enqueue, tasks), return_exceptions=True)

    assert [type(each) for each in answers if not isinstance(each, str)] == [DuplicateTask]
    assert failpoints.hits()["sqlite.before_commit"] < 50
    assert len(await storage.list_tasks(limit=1000)) == 100


async def test_a_read_does_not_wait_for_a_write(storage, path):
    await storage.enqueue(Task(id="a", func_path="m.f"))
    with hold_write_lock(path):
        writing = asyncio.ensure_future(storage.enqueue(Task(func_path="m.f")))

        assert (await storage.get_task("a")).id == "a"
        assert not writing.done()
    await writing


async def test_a_body_of_any_size_is_stored_and_read(storage):
    sizes = [0, 1, 8_000, 8_192, 9_000, 500_000]
    await storage.enqueue_many(
        Task(id=f"t{size}", func_path="m.f", args=(b"x" * size,)) for size in sizes
    )

    claimed = await storage.reserve(10)
    listed = await storage.list_tasks()

    assert sorted(len(task.args[0]) for task in claimed) == sizes
    assert sorted(len(task.args[0]) for task in listed) == sizes


async def test_a_checkpoint_of_any_size_is_stored_and_read(storage):
    await storage.enqueue(Task(id="a", func_path="m.f"))
    (task,) = await storage.reserve(1)

    for size in (0, 8_192, 8_193, 500_000):
        await storage.save_checkpoint("a", task.token, b"x" * size)
        assert await storage.load_checkpoint("a") == b"x" * size


async def test_only_claims_from_named_queues_need_an_order_by_queue(storage, path):
    await storage.enqueue_many([*some(2), *some(2, queue="mail")])
    indexes = []
    for queues in (None, ["mail"]):
        await storage.reserve(1, queues=queues)
        with closing(sqlite3.connect(path)) as db:
            found = db.execute("SELECT name FROM sqlite_master WHERE type = 'index'").fetchall()
        indexes.append({name for (name,) in found})

    assert indexes[1] - indexes[0] == {"omniq_ready_by_queue"}


# The log


@pytest.mark.timeout(120)
async def test_the_log_does_not_grow_without_bound(storage, path):
    for _ in range(60):
        await storage.enqueue_many(some(20, metadata={"filler": "x" * 7000}))
        claimed = await storage.reserve(20)
        await storage.record([done(task) for task in claimed])
    written = os.stat(path).st_size
    log = os.stat(f"{path}-wal").st_size

    assert written > 4 * 1024 * 1024
    assert log < 6 * 1024 * 1024


async def test_no_connection_runs_a_checkpoint_automatically(storage):
    await storage.enqueue_many(some(10))

    limits = await storage._backend._writer.run(
        lambda db: db.execute("PRAGMA wal_autocheckpoint").fetchone()
    )
    of_reader = await storage._backend._reader.run(
        lambda db: db.execute("PRAGMA wal_autocheckpoint").fetchone()
    )

    assert (limits, of_reader) == ((0,), (0,))


# Processes


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F25")
async def test_eight_processes_drain_one_file_and_claim_each_task_once(path):
    drained = await drain_together(f"sqlite:///{path}", processes=8, tasks=2000)

    assert drained.errors == ""
    assert len(drained.claims) == 2000
    assert set(drained.claims.values()) == {1}
    assert drained.refused == 0


OPEN = """
import asyncio, sys
from omniq.models import Task
from omniq.storage.sqlite import SQLiteStorage
async def main():
    async with SQLiteStorage(sys.argv[1]) as storage:
        await storage.enqueue(Task(id=sys.argv[2], func_path="m.f"))
asyncio.run(main())
"""


def start(code, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F98")
async def test_eight_processes_open_an_empty_file_at_once(path):
    path.touch()
    children = [start(OPEN, path, f"t{number}") for number in range(8)]
    outputs = [await asyncio.to_thread(child.communicate) for child in children]

    assert [error for _, error in outputs if error] == []
    async with SQLiteStorage(path) as storage:
        assert [task.id for task in await storage.list_tasks()] == [f"t{n}" for n in range(8)]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("failpoint", "is_stored"), [("sqlite.before_commit", False), ("sqlite.after_commit", True)]
)
@pytest.mark.fault("F02")
async def test_a_process_killed_around_a_commit_leaves_the_whole_transaction_or_nothing(
    path, failpoint, is_stored
):
    async with SQLiteStorage(path) as storage:
        await storage.enqueue(Task(id="before", func_path="m.f"))
    child = start(OPEN, path, "during", OMNIQ_FAILPOINTS=f"{failpoint}=kill@1")
    await asyncio.to_thread(child.communicate)
    assert child.returncode == -signal.SIGKILL

    async with SQLiteStorage(path) as storage:
        await storage.enqueue(Task(id="after", func_path="m.f"))
        stored = [task.id for task in await storage.list_tasks()]

    expected = {"before", "after"} | ({"during"} if is_stored else set())
    assert set(stored) == expected
    check = sqlite3.connect(path)
    assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    check.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_process_stopped_inside_a_transaction_ends_no_other_lease(path):
    async with SQLiteStorage(path) as storage:
        await storage.enqueue(Task(id="a", func_path="m.f"))
        (task,) = await storage.reserve(1)
        child = start(OPEN, path, "b", OMNIQ_FAILPOINTS="sqlite.before_commit=stop@1")
        try:
            await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)

            renewal = await storage.renew()
            assert renewal.held == {"a": task.token}
            assert [worker.id for worker in await storage.workers()] == [storage.owner]
            recording = asyncio.ensure_future(storage.record([done(task)]))
        finally:
            child.send_signal(signal.SIGCONT)
            await asyncio.to_thread(child.communicate)
        assert await recording == [True]


@pytest.mark.fault("F64")
async def test_a_lock_held_for_a_short_time_raises_no_error(storage, path):
    with hold_write_lock(path):
        waiting = [asyncio.ensure_future(storage.enqueue(task)) for task in some(3)]
        await storage.stats()
        assert not any(task.done() for task in waiting)

    assert len(await asyncio.gather(*waiting)) == 3


async def test_a_lock_held_for_too_long_raises_an_error_that_says_so(storage, path, monkeypatch):
    monkeypatch.setattr(connection, "BUSY_SECONDS", 0.05)
    with (
        hold_write_lock(path),
        pytest.raises(StorageError, match="another process has held the write lock"),
    ):
        await storage.enqueue(Task(func_path="m.f"))

    await storage.enqueue(Task(func_path="m.f"))


async def test_two_storages_of_one_process_share_a_file(path):
    async with SQLiteStorage(path) as one, SQLiteStorage(path) as other:
        await one.enqueue_many(some(10))
        claimed = await asyncio.gather(*(each.reserve(1) for each in (one, other) * 5))

        assert len({task.id for (task,) in claimed}) == 10
        assert {worker.id for worker in await one.workers()} == {one.owner, other.owner}


async def test_work_from_another_owner_ends_the_wait(path):
    async with SQLiteStorage(path) as one, SQLiteStorage(path) as other:
        assert await one.reserve(1) == []
        waiting = asyncio.ensure_future(one.wait_for_work(30))
        await asyncio.sleep(0)

        await other.enqueue(Task(func_path="m.f"))
        async with asyncio.timeout(30):
            await waiting


async def test_work_added_between_the_claim_and_the_wait_is_noticed(path):
    async with SQLiteStorage(path) as one, SQLiteStorage(path) as other:
        assert await one.reserve(1) == []
        await other.enqueue(Task(func_path="m.f"))

        async with asyncio.timeout(30):
            await one.wait_for_work(30)


async def test_after_a_claim_that_got_all_it_asked_for_one_wait_ends_without_a_search(path):
    async with SQLiteStorage(path) as one, SQLiteStorage(path) as other:
        await one.enqueue(Task(func_path="m.f"))
        assert len(await one.reserve(1)) == 1
        async with asyncio.timeout(30):
            await one.wait_for_work(3600)
        waiting = asyncio.ensure_future(one.wait_for_work(3600))
        _, still_waiting = await asyncio.wait({waiting}, timeout=0.1)

        assert still_waiting == {waiting}
        await other.enqueue(Task(func_path="m.f"))
        async with asyncio.timeout(30):
            await waiting


async def test_a_sibling_renews_while_another_process_holds_the_write_lock(storage, path):
    await storage.renew()
    with hold_write_lock(path):
        async with storage.sibling() as sibling:
            renewal = await sibling.renew()

    assert renewal.held == {}


# Leases


@pytest.mark.fault("F27")
async def test_recovery_that_died_between_fence_and_give_back_is_finished_by_the_next(path):
    clock = ManualClock()
    make = partial(SQLiteStorage, path, clock=clock, settings=QUICK)
    async with make() as lost, make() as alive:
        await lost.enqueue(Task(id="a", func_path="m.f"))
        (task,) = await lost.reserve(1)
        clock.advance(timedelta(minutes=5))
        failpoints.configure("sqlite.after_fence=raise:EIO@1")
        with pytest.raises(OSError, match="failpoint"):
            await alive.give_back_abandoned()
        assert await alive.get_task("a") is not None
        assert (await alive.held_by(lost.owner)) == {"a": task.token}

        given_back = await alive.give_back_abandoned()

        assert [each.task_id for each in given_back] == ["a"]
        with pytest.raises(LeaseLost):
            await lost.renew()


@pytest.mark.fault("F28")
async def test_a_claim_under_way_while_its_owner_is_fenced_is_refused(path):
    clock = ManualClock()
    make = partial(SQLiteStorage, path, clock=clock, settings=QUICK)
    async with make() as slow, make() as other:
        await slow.renew()
        owner = slow.owner
        await other.enqueue_many(some(2))
        clock.advance(timedelta(minutes=5))
        await other.give_back_abandoned()

        claim = slow._claim_request(1, None, None, None, None)
        with pytest.raises(LeaseLost):
            await slow._engine.record_and_claim(owner, [], claim)

        assert len(await other.reserve(2)) == 2


async def test_a_task_that_gets_the_number_of_an_ended_one_is_no_forgotten_claim(path):
    async with SQLiteStorage(path) as storage:
        await storage.enqueue(Task(id="a", func_path="m.f", result_ttl=0))
        (first,) = await storage.reserve(1)
        await storage.mark_done("a", TaskResult(task_id="a", status=TaskStatus.SUCCESS))
        await storage.enqueue(Task(id="b", func_path="m.f", result_ttl=0))
        (second,) = await storage.reserve(1)

        # The store gives the number of the deleted task again, and the token begins again at 1.
        assert (second.id, second.token) == ("b", first.token)


async def test_a_reboot_ends_every_lease(path):
    clock = ManualClock()
    make = partial(SQLiteStorage, path, clock=clock, settings=QUICK)
    async with make() as lost, make() as alive:
        await lost.enqueue(Task(id="a", func_path="m.f"))
        await lost.reserve(1)
        clock.reboot()

        assert await alive.workers() == []
        assert [each.task_id for each in await alive.give_back_abandoned()] == ["a"]


def backend_of(storage: SQLiteStorage) -> SQLiteBackend:
    assert isinstance(storage._backend, SQLiteBackend)
    return storage._backend


async def test_an_owner_whose_lease_is_gone_counts_as_dead(path):
    async with SQLiteStorage(path) as lost, SQLiteStorage(path) as alive:
        await lost.enqueue(Task(id="a", func_path="m.f"))
        await lost.reserve(1)
        await backend_of(alive)._leases.run(
            lambda db: db.execute("DELETE FROM omniq_leases").rowcount
        )

        assert [each.task_id for each in await alive.give_back_abandoned()] == ["a"]
        with pytest.raises(LeaseLost):
            await lost.renew()


async def test_old_fences_are_forgotten(path):
    clock = ManualClock()
    make = partial(SQLiteStorage, path, clock=clock, settings=QUICK)
    async with make() as alive:
        for _ in range(3):
            async with make() as gone:
                await gone.renew()
        clock.advance(timedelta(microseconds=leases.FENCE_RETENTION) * 2)
        async with make() as last:
            await last.renew()
            clock.advance(timedelta(minutes=5))
            await alive.give_back_abandoned()
            fences = await backend_of(alive)._reader.run(
                lambda db: (
                    db.execute("SELECT count(*) FROM omniq_fences").fetchone()[0],
                    db.execute("SELECT count(*) FROM leases.omniq_leases").fetchone()[0],
                )
            )

    assert fences == (1, 1)


async def test_an_old_claim_does_not_match_a_new_task_with_the_same_seq(path):
    """The `seq` of a deleted task is used again; a claim on it must not match the new task."""
    clock = ManualClock()
    make = partial(SQLiteStorage, path, clock=clock, settings=QUICK)
    async with make() as slow, make() as other:
        await slow.enqueue(Task(id="a", func_path="m.f", result_ttl=0))
        (lost,) = await slow.reserve(1)
        clock.advance(timedelta(minutes=5))
        await other.give_back_abandoned()
        (again,) = await other.reserve(1)
        await other.record([done(again)])
        with pytest.raises(LeaseLost):
            await slow.renew()
        await other.enqueue(Task(id="b", func_path="m.f"))
        await slow.reserve(1)

        assert await slow.record([done(lost)]) == [False]
        other_task = await slow.get_task("b")
        assert other_task is not None
        assert other_task.status is TaskStatus.RUNNING


async def test_a_cancellation_or_checkpoint_after_the_claim_is_seen_by_the_outcome(storage, path):
    await storage.enqueue_many([Task(id="a", func_path="m.f"), Task(id="b", func_path="m.f")])
    first, second = await storage.reserve(2)
    async with SQLiteStorage(path) as other:
        await other.cancel("a")
    await storage.save_checkpoint("b", second.token, b"step")

    await storage.record([Released("a", first.token), done(second)])

    assert (await storage.get_task("a")).status is TaskStatus.CANCELLED
    assert await storage.load_checkpoint("b") is None


# Files


async def test_files_are_readable_only_by_their_user(tmp_path):
    path = tmp_path / "new" / "tasks.db"
    mask = os.umask(0)
    try:
        async with SQLiteStorage(path) as storage:
            await storage.renew()
            await storage.enqueue(Task(func_path="m.f"))
            modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
    finally:
        os.umask(mask)

    ends = ("", "-wal", "-shm", "-leases", "-leases-wal", "-leases-shm")
    assert modes == {f"tasks.db{end}": 0o600 for end in ends}
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_no_column_takes_a_value_of_another_type(storage, path):
    await storage.enqueue_many(some(3))
    finished, dead = await storage.reserve(2)
    error = TaskError("failed", error_type="ValueError")
    await storage.record_and_reserve([done(finished), Failed(dead.id, dead.token, error)], 0)
    wrong = {"TEXT": (b"x",), "INTEGER": ("x", b"1", 1.5, 1e300), "BLOB": ("x", 1, 1.5)}

    with closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO omniq_fences VALUES ('worker', 1)")
        names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'omniq%'"
        found = [name for (name,) in db.execute(names)]
        for table in found:
            for _, column, kind, *_ in db.execute(f"PRAGMA table_info({table})").fetchall():
                for value in wrong[kind]:
                    with pytest.raises(sqlite3.IntegrityError, match=r"CHECK|datatype mismatch"):
                        db.execute(f'UPDATE {table} SET "{column}" = ?', (value,))

    assert len(found) == 7


@pytest.mark.fault("F93")
async def test_a_schema_of_a_later_version_is_refused(path):
    future = sqlite3.connect(path)
    future.execute("PRAGMA user_version = 99")
    future.close()

    with pytest.raises(StorageError, match=r"version 99.*upgrade omniq"):
        await SQLiteStorage(path).open()


async def test_a_file_that_is_not_a_database_is_refused_and_unchanged(path):
    path.write_bytes(b"not a database at all\n" * 100)

    with pytest.raises(StorageCorrupt, match="not a database"):
        await SQLiteStorage(path).open()

    assert path.read_bytes().startswith(b"not a database")


async def test_a_folder_that_cannot_be_created_raises_an_error(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(StorageError, match="cannot be created"):
        await SQLiteStorage(tmp_path / "file" / "tasks.db").open()


@pytest.mark.parametrize("end", ["", "-wal"])
@pytest.mark.fault("F64")
async def test_a_deleted_file_raises_an_error(path, end):
    storage = SQLiteStorage(path)
    await storage.open()
    await storage.enqueue(Task(func_path="m.f"))
    os.unlink(f"{path}{end}")

    with pytest.raises(StorageError, match="has gone"):
        await storage.enqueue(Task(func_path="m.f"))
    await storage.close()


async def test_a_file_that_was_deleted_before_the_first_write_is_not_created_again(path):
    async with SQLiteStorage(path):
        pass
    async with SQLiteStorage(path) as storage:
        os.unlink(path)

        with pytest.raises(StorageError, match="has gone"):
            await storage.enqueue(Task(func_path="m.f"))
        with pytest.raises(StorageError, match="has gone"):
            await storage.stats()

    assert not path.exists()


@pytest.mark.fault("F64")
async def test_a_replaced_file_raises_an_error_at_the_renewal(path):
    storage = SQLiteStorage(path)
    await storage.open()
    await storage.renew()
    os.rename(path, f"{path}.old")
    path.touch()

    with pytest.raises(StorageError, match="was replaced"):
        await storage.renew()
    with pytest.raises(StorageError, match="was replaced"):
        await storage.close()


async def test_the_storage_of_a_parent_process_is_refused_in_its_child(storage):
    await storage.enqueue(Task(id="a", func_path="m.f"))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(StorageError, match="after a fork"):
                storage._check_open()
            os.write(write, b"refused")
            status = 0
        finally:
            os._exit(status)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    answer = os.read(read, 100)
    os.close(read)
    os.close(write)

    assert (status, answer) == (0, b"refused")
    assert (await storage.get_task("a")).id == "a"


def test_a_queue_that_is_dropped_without_being_closed_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    dropped = [TaskQueue(f"sqlite:///{tmp_path}/{number}.db") for number in range(3)]
    for each in dropped:
        each.open()
        each.stats()
    threads = set(threading.enumerate()) - before
    assert len(threads) >= 6
    del dropped, each
    for _ in range(100):
        # Again: a thread that has just answered may still refer to its queue.
        gc.collect()
        if not any(thread.is_alive() for thread in threads):
            break
        time.sleep(0.1)

    assert not any(thread.is_alive() for thread in threads)


async def test_close_ends_all_threads_and_removes_the_logs(path):
    before = threading.active_count()
    async with SQLiteStorage(path) as storage:
        await storage.enqueue(Task(func_path="m.f"))
        await storage.stats()

    assert threading.active_count() == before
    assert sorted(os.listdir(path.parent)) == ["tasks.db", "tasks.db-leases"]


# The disk


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a disk of a few megabytes can be mounted by root only")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.fault("F54", "F64")
async def test_a_full_disk_raises_an_error_and_the_storage_works_again_later(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 1024 * 1024)
    async with SQLiteStorage(small_disk / "tasks.db") as storage:
        stored: list[str] = []

        async def fill():
            for _ in range(1000):
                stored.extend(await storage.enqueue_many(some(50, metadata={"filler": "x" * 1000})))

        with pytest.raises(StorageError, match="full"):
            await fill()
        assert stored

        ballast.unlink()
        stored += await storage.enqueue_many(some(50))

        assert sorted(stored) == [task.id for task in await storage.list_tasks(limit=10_000)]


async def test_a_system_error_is_raised_to_every_caller_of_the_transaction(storage):
    failpoints.configure("sqlite.before_commit=raise:EIO@1")
    answers = await asyncio.gather(
        *(storage.enqueue(task) for task in some(5)), return_exceptions=True
    )

    failed = [each for each in answers if isinstance(each, StorageError)]
    assert failed
    assert len(await storage.list_tasks()) == 5 - len(failed)


async def test_a_count_does_not_delay_other_reads(storage, monkeypatch):
    """A count of a large store takes a second; other reads must not wait for it."""
    began, may_end = threading.Event(), threading.Event()
    count = queries.count_all

    def slow(*given):
        began.set()
        assert may_end.wait(10)
        return count(*given)

    monkeypatch.setattr(queries, "count_all", slow)
    await storage.enqueue(Task(id="a", func_path="m.f"))
    counting = asyncio.create_task(storage.stats())
    await asyncio.to_thread(began.wait, 10)
    task = await storage.get_task("a")
    scan = await storage.scan_tasks()
    is_counting = not counting.done()
    may_end.set()
    stats = await counting

    assert task is not None
    assert len(scan.tasks) == 1
    assert is_counting
    assert stats.by_status[TaskStatus.PENDING] == 1


async def test_a_repeated_outcome_does_not_end_a_later_task_that_has_the_same_number(storage):
    """The `seq` of a task that is deleted when it ends is given again."""
    task = Task(id="a", func_path="m.f", result_ttl=0)
    await storage.enqueue(task)
    await storage.reserve(1)
    outcome = Succeeded("a", 1, TaskResult(task_id="a", status=TaskStatus.SUCCESS))
    # As after a call that was cancelled while the outcome was committed: the owner knows the row still.
    known = storage._engine._known
    rows = dict(known._rows)
    assert await storage.record([outcome]) == [True]
    known._rows.update(rows)
    known.doubt([outcome])
    await storage.enqueue(msgspec.structs.replace(task, id="b"))
    (later,) = await storage.reserve(1)

    assert await storage.record([outcome]) == [False]
    found = await storage.get_task("b")
    assert found is not None
    assert (found.status, found.token) == (TaskStatus.RUNNING, later.token)
