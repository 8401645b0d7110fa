"""What an older omniq stored with a key, and without a seal, waits until an operator has it signed.

`tests/storage/data/older_signed.json` has a store of each kind that the last version without such seals has written,
with the tasks of `tests/storage/older_tasks.py`.
"""

from __future__ import annotations

import json
import sqlite3
from base64 import b64decode
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
import redis

from omniq import AsyncTaskQueue, Settings
from omniq.cli import main
from omniq.errors import NotSealed, SerializationError
from omniq.events import Dispatcher, Event, WorkerProblem
from omniq.models import Schedule, Task, TaskStatus
from omniq.operations.doctor import check_storage
from omniq.operations.explain import explain
from omniq.outcomes import Retried
from omniq.serialization import Serializer, encode_internal, serializer_for
from omniq.storage import open_storage
from omniq.storage.postgres import statements
from omniq.tasks.steps import CheckpointData
from omniq.testing.builders import a_result, an_error
from omniq.worker.schedule_loop import ScheduleLoop
from tests.storage import older_tasks

STORES = Path(__file__).parents[1] / "storage/data/older_signed.json"
KEY = "a key of the older omniq"
SIGNED = Settings(signing_key=KEY)
SCHEDULES = ["nightly", "often", "paused"]
CHECKPOINTS = ["in-process", "transfer"]


@cache
def _stores() -> dict[str, Any]:
    stores: dict[str, Any] = json.loads(STORES.read_text(encoding="utf-8"))
    return stores


@pytest.fixture
def older_url(store_url: str) -> str:
    """The URL of a store that the older omniq has written."""
    kind = store_url.partition(":")[0]
    {
        "sqlite": _write_sqlite,
        "file": _write_files,
        "postgresql": _write_postgres,
        "redis": _write_redis,
    }[kind](store_url)
    return store_url


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    older_tasks.CALLS.clear()


def _write_sqlite(url: str) -> None:
    path = Path(urlsplit(url).path[1:])
    for name, script in _stores()["sqlite"].items():
        file = path.with_name(name.replace("tasks.db", path.name))
        file.touch(mode=0o600)
        with closing(sqlite3.connect(file)) as db:
            db.executescript(script)


def _write_files(url: str) -> None:
    root = Path(urlsplit(url).path)
    root.mkdir(mode=0o700)
    for name, data in _stores()["file"].items():
        if data is None:
            (root / name).mkdir(mode=0o700)
        else:
            (root / name).touch(mode=0o600)
            (root / name).write_bytes(b64decode(data))


def _write_postgres(url: str) -> None:
    parts = urlsplit(url)
    schema = parse_qs(parts.query)["schema"][0]
    versions = 'CREATE TABLE "{0}".versions (version int PRIMARY KEY, applied_at timestamptz)'
    script = [
        f'CREATE SCHEMA "{schema}"',
        versions.format(schema),
        *(statements.migration(schema, name) for name in statements.migrations()[:3]),
        f'DELETE FROM "{schema}".store',
        *(line.replace("{schema}", f'"{schema}"') for line in _stores()["postgres"]),
    ]
    with psycopg.connect(parts._replace(query="").geturl(), autocommit=True) as db:
        for statement in script:
            db.execute(statement.encode())
    assert _omniq("schema", "upgrade", "--url", url) == 0


def _write_redis(url: str) -> None:
    base, _, query = url.partition("?")
    client = redis.Redis.from_url(base)
    for name, (kind, value) in _stores()["redis"].items():
        key = f"{{{parse_qs(query)['prefix'][0]}}}:{name}"
        match kind:
            case "string":
                client.set(key, b64decode(value))
            case "hash":
                fields: dict[Any, Any] = {
                    b64decode(field): b64decode(data) for field, data in value.items()
                }
                client.hset(key, mapping=fields)
            case "zset":
                client.zadd(key, {b64decode(member): score for member, score in value.items()})
    client.close()


def _omniq(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


async def _run_all(queue: AsyncTaskQueue) -> None:
    async with queue.worker(concurrency=2) as pool:
        await pool.run_until_empty()


@pytest.mark.security("S61")
@pytest.mark.timeout(60)
async def test_they_wait_visibly_and_are_neither_run_nor_replaced(older_url):
    emitted: list[Event] = []
    events = Dispatcher()
    events.subscribe(emitted.append)
    async with AsyncTaskQueue(older_url, settings=SIGNED) as queue:
        storage = queue.storage
        older = await storage.older_documents()
        before = await storage.load_checkpoint("transfer")
        await queue.schedules.declare(older_tasks)
        await ScheduleLoop(storage, events, 1.0)._report_older()
        await ScheduleLoop(storage, events, 1.0).fire_due()
        await _run_all(queue)
        found = {task.id: task for task in await queue.list_tasks()}
        reasons = [(await explain(storage, task_id)).reasons[0] for task_id in CHECKPOINTS]
        warned = [finding for finding in await check_storage(storage) if finding.verdict != "ok"]

        assert [each.id for each in older] == SCHEDULES + CHECKPOINTS
        assert [each.problem for each in older] == [""] * 5
        assert sorted(found) == CHECKPOINTS
        assert all(not task.status.is_final for task in found.values())
        assert await storage.load_checkpoint("transfer") == before
        assert older_tasks.CALLS == []
        assert await queue.schedules.list() == []
        with pytest.raises(NotSealed, match="run 'omniq schema upgrade' with the key"):
            await queue.schedules.get("nightly")
        reported = [event for event in emitted if isinstance(event, WorkerProblem)]
        assert [event.activity for event in reported] == [f"schedule {name}" for name in SCHEDULES]
        assert all("omniq schema upgrade" in event.error for event in reported)
        assert [reason.code for reason in reasons] == ["unsealed_checkpoint"] * 2
        assert all("omniq schema upgrade" in reason.hint for reason in reasons)
        assert ("of an older omniq", "3 schedules, 2 checkpoints") in [
            (finding.name, finding.value) for finding in warned
        ]


@pytest.mark.security("S61")
@pytest.mark.timeout(60)
async def test_signed_by_an_operator_they_go_on_where_they_were(older_url):
    async with AsyncTaskQueue(older_url, settings=SIGNED) as queue:
        storage = queue.storage
        for older in await storage.older_documents():
            assert await storage.seal_older(older)
            assert not await storage.seal_older(older)
        nightly = await queue.schedules.get("nightly")
        paused = await queue.schedules.get("paused")
        await ScheduleLoop(storage, Dispatcher(), 1.0).fire_due()
        await _run_all(queue)
        results = [await queue.get_result(task_id) for task_id in CHECKPOINTS]
        fired = [task for task in await queue.list_tasks() if task.schedule_id == "often"]

        assert await storage.older_documents() == []
        assert nightly is not None
        assert (nightly.cron, nightly.task.args) == ("0 3 * * *", ("night",))
        assert paused is not None
        assert paused.paused
        # The step and the first row were done by the older omniq, and are not done again.
        assert older_tasks.CALLS == ["row 2", "row 3", "pay 7"]
        assert [result and result.result for result in results] == [
            "reserve 8",
            ["reserve 7", "pay 7 again"],
        ]
        assert {task.status for task in fired} == {TaskStatus.SUCCESS}


@pytest.mark.security("S61")
def test_the_command_shows_what_it_will_trust_and_asks(older_url, capsys, monkeypatch):
    upgrade = ("schema", "upgrade", "--url", older_url)
    capsys.readouterr()
    without_key = _omniq(*upgrade), capsys.readouterr().out
    monkeypatch.setenv("OMNIQ_SIGNING_KEY", KEY)
    listed = _omniq("schedules", "list", "--url", older_url), capsys.readouterr()
    dry = _omniq(*upgrade, "--dry-run"), capsys.readouterr().out
    asked = _omniq(*upgrade), capsys.readouterr().err
    signed = _omniq(*upgrade, "--yes"), capsys.readouterr().out
    again = _omniq(*upgrade, "--yes"), capsys.readouterr().out

    assert without_key[0] == 0
    assert "no key is set" in without_key[1]
    assert listed[0] == 0
    assert listed[1].out.count("unsigned") == 3
    assert "omniq schema upgrade" in listed[1].err
    assert dry[0] == 0
    for shown in ("0 3 * * * UTC", '["night"]', "every 60 s", "paused", "reserve", "1 of rows"):
        assert shown in dry[1]
    assert "older_tasks.transfer" in dry[1]
    assert asked[0] != 0
    assert "Sign 5 records" in asked[1]
    assert "--yes" in asked[1]
    assert signed[0] == 0
    assert "signed: 5" in signed[1]
    assert "all schedules and checkpoints are sealed" in again[1]


@pytest.mark.security("S61")
async def test_what_an_attacker_planted_as_an_older_record_cannot_be_signed(store_url):
    """The signed call of a task as that of a schedule, and the result of another task as that of a step."""
    sealed = serializer_for(SIGNED)
    async with open_storage(store_url, serializer=_WithoutDocumentSeals(sealed)) as storage:
        paid = Task(id="paid", func_path="tests.storage.older_tasks.report", args=("paid",))
        await storage.put_schedule(Schedule(id="every-minute", task=paid, interval=60.0))
        await storage.enqueue(
            Task(id="steps", func_path="tests.storage.older_tasks.transfer", args=(7,))
        )
        (task,) = await storage.reserve(1)
        approved = sealed.encode_result(a_result(paid, True))
        data = CheckpointData(steps={"approve": approved})
        await storage.save_checkpoint(task.id, task.token, encode_internal(data))
        await storage.record([Retried(task.id, task.token, an_error(), storage.clock.now())])

    async with AsyncTaskQueue(store_url, settings=SIGNED) as queue:
        older = await queue.storage.older_documents()
        await _run_all(queue)
        dead_letter = await queue.dead.get("steps")

        assert [each.id for each in older] == ["every-minute", "steps"]
        for each in older:
            assert "no known key has signed" in each.problem
            with pytest.raises(SerializationError, match="no known key"):
                await queue.storage.seal_older(each)
        assert dead_letter is not None
        assert older_tasks.CALLS == []


class _WithoutDocumentSeals:
    """Seals tasks and results, and, as the older omniq did, no documents."""

    def __init__(self, sealed: Serializer) -> None:
        self.encode_task, self.decode_task = sealed.encode_task, sealed.decode_task
        self.encode_result, self.decode_result = sealed.encode_result, sealed.decode_result


@pytest.mark.security("S61")
async def test_a_record_that_changes_after_it_was_shown_is_not_signed(older_url):
    async with AsyncTaskQueue(older_url, settings=SIGNED) as queue:
        storage = queue.storage
        shown = {older.id: older for older in await storage.older_documents()}
        await queue.schedules.add("nightly", older_tasks.report, cron="0 4 * * *")

        assert not await storage.seal_older(shown["nightly"])
        changed = await queue.schedules.get("nightly")
        assert changed is not None
        assert changed.cron == "0 4 * * *"
