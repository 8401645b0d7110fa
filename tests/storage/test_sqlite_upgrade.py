"""A store that an earlier version wrote is upgraded when it is opened, with all that it holds."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from omniq.errors import DuplicateTask, StorageError
from omniq.models import Task, TaskResult, TaskStatus
from omniq.outcomes import Succeeded
from omniq.settings import Settings
from omniq.storage.sqlite import SQLiteStorage, connection
from omniq.testing.clock import ManualClock

DUMP = Path(__file__).parent / "data" / "sqlite_version_2.sql"
"""Two tasks each: finished, dead, cancelled, retrying, held, parked, rated, unique, delayed, ready, released."""

WORKER = "01KDWPVNG00000000000000002"
"""The owner of the held tasks, which has died."""


def restore(path, version):
    """Make the store of the dump, or the one that version 1 would have written."""
    store, leases = DUMP.read_text(encoding="utf-8").split("-- leases\n")
    newer = {
        path: ("INDEX omniq_retrying", "INDEX omniq_ended_badly"),
        path.with_name(f"{path.name}-leases"): ("TABLE omniq_resting",),
    }
    for file, script in zip(newer, (store, leases), strict=True):
        file.touch(mode=0o600)
        with closing(sqlite3.connect(file)) as db:
            db.executescript(script)
            if version == 1:
                for each in newer[file]:
                    db.execute(f"DROP {each}")
            db.execute(f"PRAGMA user_version = {version}")
            db.commit()


@pytest.fixture
def clock():
    clock = ManualClock()
    while clock.new_id() <= WORKER:
        # The ids of the store's own clock.
        pass
    return clock


@pytest.fixture
def make(tmp_path, clock):
    return partial(
        SQLiteStorage, tmp_path / "tasks.db", clock=clock, settings=Settings(durability="os")
    )


@pytest.fixture(params=[1, 2])
async def upgraded(request, tmp_path, make):
    restore(tmp_path / "tasks.db", request.param)
    async with make() as storage:
        yield storage


def done(task):
    result = TaskResult(task_id=task.id, status=TaskStatus.SUCCESS, attempts=1)
    return Succeeded(task.id, task.token, result)


async def test_every_task_has_its_status_and_arguments(upgraded):
    tasks = {task.id: task for task in await upgraded.list_tasks(limit=100)}
    kinds = {
        "finished": TaskStatus.SUCCESS,
        "dead": TaskStatus.FAILED,
        "cancelled": TaskStatus.CANCELLED,
        "retrying": TaskStatus.RETRYING,
        "held": TaskStatus.RUNNING,
        "unique": TaskStatus.PENDING,
        "delayed": TaskStatus.PENDING,
        "ready": TaskStatus.PENDING,
        "released": TaskStatus.PENDING,
    }

    for kind, status in kinds.items():
        for number in range(2):
            task = tasks.pop(f"{kind}{number}")
            assert (task.status, task.args, task.queue) == (status, (kind, number), kind)
    assert {task.id: task.status for task in tasks.values()} == {
        "parked0": TaskStatus.RUNNING,
        "parked1": TaskStatus.PENDING,
        "rated0": TaskStatus.RUNNING,
        "rated1": TaskStatus.PENDING,
        "repeats": TaskStatus.PENDING,
    }
    assert (await upgraded.get_task("released0")).releases == 1
    stats = await upgraded.stats()
    assert (stats.by_status[TaskStatus.PENDING], stats.dead) == (11, 2)


async def test_results_histories_and_documents_are_kept(upgraded):
    assert (await upgraded.get_result("finished1")).result == "finished1"
    assert (await upgraded.get_result("repeats")).result == "repeats"
    assert [each.error.message for each in await upgraded.history("retrying0")] == ["again"]
    assert (await upgraded.get_dead("dead0")).checkpoint == b"step dead0"
    assert [each.error.message for each in await upgraded.history("dead1")] == ["broken"]
    assert await upgraded.load_checkpoint("held0") == b"half"
    assert (await upgraded.get_progress("held0")).message == "half"
    assert await upgraded.paused_queues() == {"ready"}
    assert set(await upgraded.gates()) == {"rate:rate", "running:one"}
    schedule = await upgraded.get_schedule("nightly")
    assert (schedule.cron, schedule.task.args) == ("0 3 * * *", ("nightly",))
    assert [each.id for each in await upgraded.workers()] == [WORKER]


async def test_a_unique_key_is_still_held(upgraded):
    again = Task(func_path="m.f", unique="key1")

    assert await upgraded.enqueue(again) == "unique1"
    with pytest.raises(DuplicateTask):
        await upgraded.enqueue(Task(id="delayed0", func_path="m.f"))


async def test_a_limit_admits_no_more_than_before(upgraded):
    assert await upgraded.reserve(10, queues=["parked", "rated"]) == []


async def test_everything_is_drained_and_nothing_is_lost(upgraded, clock, make):
    await upgraded.resume_queue("ready")
    clock.advance(timedelta(hours=2))
    given_back = await upgraded.give_back_abandoned()
    for task_id in ("dead0", "dead1"):
        assert await upgraded.retry_dead(task_id)
    drained = set()
    for _ in range(50):
        clock.advance(timedelta(hours=1))
        claimed = await upgraded.reserve(10)
        drained |= {task.id for task in claimed}
        await upgraded.record([done(task) for task in claimed])

    assert {each.task_id for each in given_back} == {"held0", "held1", "parked0", "rated0"}
    kinds = (
        "dead",
        "retrying",
        "held",
        "parked",
        "rated",
        "unique",
        "delayed",
        "ready",
        "released",
    )
    assert drained == {f"{kind}{n}" for kind in kinds for n in range(2)} | {"repeats"}
    assert await upgraded.count_waiting() == 0
    assert await upgraded.load_checkpoint("held0") is None


async def test_the_new_version_is_written_so_that_earlier_versions_refuse_it(upgraded, tmp_path):
    for file in ("tasks.db", "tasks.db-leases"):
        with closing(sqlite3.connect(tmp_path / file)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (connection.SCHEMA_VERSION,)
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_an_upgrade_that_fails_changes_nothing(tmp_path, make):
    path = tmp_path / "tasks.db"
    restore(path, 2)
    with closing(sqlite3.connect(path)) as db:
        before = list(db.iterdump())
        db.execute("CREATE TABLE omniq_documents (note TEXT)")

    with pytest.raises(StorageError, match="omniq_documents"):
        await make().open()
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE omniq_documents")

        assert list(db.iterdump()) == before
        assert db.execute("PRAGMA user_version").fetchone() == (2,)


# One lease file


async def test_a_symbolic_link_leads_to_the_same_leases(tmp_path, make, clock):
    (tmp_path / "link.db").symlink_to(tmp_path / "tasks.db")
    async with make() as storage, SQLiteStorage(tmp_path / "link.db", clock=clock) as linked:
        await storage.renew()

        assert [worker.id for worker in await linked.workers()] == [storage.owner]
        assert not (tmp_path / "link.db-leases").exists()


async def test_a_database_with_a_second_name_is_refused(tmp_path, make, clock):
    async with make():
        pass
    os.link(tmp_path / "tasks.db", tmp_path / "other.db")

    with pytest.raises(StorageError, match=r"it is also .*tasks\.db.*under that name only"):
        await SQLiteStorage(tmp_path / "other.db", clock=clock).open()


async def test_a_copy_and_a_store_without_its_leases_are_opened(tmp_path, make, clock):
    async with make() as storage:
        await storage.enqueue(Task(id="a", func_path="m.f"))
    (tmp_path / "copy.db").write_bytes((tmp_path / "tasks.db").read_bytes())
    (tmp_path / "copy.db").chmod(0o600)
    (tmp_path / "tasks.db-leases").unlink()

    for file in ("tasks.db", "copy.db"):
        async with SQLiteStorage(tmp_path / file, clock=clock) as storage:
            assert [task.id for task in await storage.reserve(1)] == ["a"]


async def test_an_owner_stops_when_others_use_another_lease_file(tmp_path, make, clock):
    async with make() as storage:
        await storage.renew()
        with closing(sqlite3.connect(tmp_path / "tasks.db-leases")) as leases:
            leases.execute("UPDATE omniq_lease_file SET id = 'another'")
            leases.commit()

        with pytest.raises(StorageError, match="with other leases"):
            await storage.renew()


@pytest.mark.security("S39")
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("omniq_dead", "status", "absurd"),
        ("omniq_live", "token", b"\xff"),
        ("omniq_finished", "finished_at", 1.5),
        ("omniq_checkpoints", "saved_at", "absurd"),
        ("omniq_schedules", "schedule", -1),
        ("omniq_tasks", "priority", "absurd"),
    ],
)
async def test_a_value_that_omniq_never_wrote_does_not_stop_the_upgrade(
    tmp_path, make, table, column, value
):
    path = tmp_path / "tasks.db"
    restore(path, 2)
    with closing(sqlite3.connect(path)) as db:
        ((key, *_), *_) = [
            each[1:] for each in db.execute(f"PRAGMA table_info({table})") if each[5]
        ]
        first = f"{key} = (SELECT min({key}) FROM {table})"
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {first}", (value,))
        db.commit()

    async with make() as storage:
        tasks = await storage.list_tasks(limit=100)
        await storage.list_dead()
        await storage.list_schedules()
        await storage.stats()
        claimed = await storage.reserve(50)

    assert len(tasks) >= 15
    assert claimed
