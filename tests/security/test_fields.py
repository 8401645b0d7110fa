"""One absurd value in one field of one record costs at most that record: the worker and all lists go on.

The attacks are generated: from the schema of a database, every column of every table, with values that
its type admits and omniq never writes; on stores without columns, every value inside every record that is
MessagePack, and every part of one that is text. Values that the database refuses are no attack.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from omniq import AsyncTaskQueue
from omniq.errors import OmniqError
from omniq.outcomes import Failed
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.testing.builders import a_task, an_error
from tests.security import sample_tasks
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import (
    Address,
    RawPostgresStore,
    RawSQLiteStore,
    RawStore,
    fill,
    use,
)

# A bad value in what describes the whole store may make it unusable, with a clear error.
_OF_THE_STORE = re.compile(
    r"(^|[_/:])(store|migrations|meta|format|fences|leases|workers|sequence|counts)\b"
)


class Attack(ABC):
    """A column of a row, and a value for it."""

    def __init__(self, table: str, column: str, row: Any, value: Any) -> None:
        self.table, self.column, self.row, self.value = table, column, row, value

    def __repr__(self) -> str:
        return f"{self.table}.{self.column} of {self.row!r} = {self.value!r:.60}"

    @abstractmethod
    def make(self) -> bool:
        """Write the value; False if the database refuses it."""


_INTEGERS = (None, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
_TEXTS = (None, "", "x", "../../x", "a\nb", "é" * 2000, "\x1b[2J")
_BLOBS = (None, b"", b"\xff", b"\xc1\x01" + bytes(50), b"\x93\x01\x02\x03", bytes(100_000))
_ANY = (*_INTEGERS, *_TEXTS[1:], *_BLOBS[1:], 1e308, -0.5)


class SQLiteAttack(Attack):
    store: RawSQLiteStore

    @staticmethod
    def all(store: RawSQLiteStore) -> Iterator[SQLiteAttack]:
        db = store._db
        names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'omniq%'"
        for (table,) in db.execute(names).fetchall():
            columns = [each[1] for each in db.execute(f"PRAGMA table_info({table})")]
            key = store._key(table) or "rowid"
            rows = [row for (row,) in db.execute(f"SELECT {key} FROM {table} ORDER BY 1")]
            for column in columns:
                for row in rows:
                    for value in _ANY:
                        attack = SQLiteAttack(table, column, row, value)
                        attack.store = store
                        yield attack

    def make(self) -> bool:
        key = self.store._key(self.table) or "rowid"
        try:
            done = self.store._db.execute(
                f"UPDATE {self.table} SET {self.column} = ? WHERE {key} = ?", (self.value, self.row)
            )
        except (sqlite3.Error, OverflowError):
            return False
        return done.rowcount > 0


_POSTGRES_VALUES: dict[str, tuple[Any, ...]] = {
    "bigint": _INTEGERS,
    "integer": (None, -1, 0, 1, 2**31 - 1, -(2**31)),
    "smallint": (None, -1, 0, 99, 2**15 - 1, -(2**15)),
    "boolean": (None, True, False),
    "text": _TEXTS,
    "bytea": _BLOBS,
    "double precision": (None, -1.0, 0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    "ARRAY": (None,),
}


class PostgresAttack(Attack):
    store: RawPostgresStore

    @staticmethod
    def all(store: RawPostgresStore) -> Iterator[PostgresAttack]:
        columns = store._all(
            "SELECT c.table_name, c.column_name, c.data_type FROM information_schema.columns c "
            "JOIN information_schema.tables t USING (table_schema, table_name) "
            "WHERE table_schema = %s AND table_type = 'BASE TABLE' ORDER BY 1, 2",
            store.schema,
        )
        for table, column, kind in columns:
            key = store._key(table)
            if key == "id" and not any(each[:2] == (table, "id") for each in columns):
                continue
            found = store._all(f'SELECT {key} FROM "{store.schema}".{table} ORDER BY 1')
            rows = [row for (row,) in found]
            for row in rows:
                for value in _POSTGRES_VALUES.get(kind, ()):
                    attack = PostgresAttack(table, column, row, value)
                    attack.store = store
                    yield attack

    def make(self) -> bool:
        statement = (
            f'UPDATE "{self.store.schema}".{self.table} SET {self.column} = %s '
            f"WHERE {self.store._key(self.table)} = %s"
        )
        try:
            done = self.store._db.execute(statement.encode(), (self.value, self.row))
        except psycopg.Error:
            return False
        return done.rowcount > 0


class RecordAttack(Attack):
    """A value inside a stored record of a file or of Redis."""

    store: RawStore
    changed: Callable[[], bytes]

    @staticmethod
    def all(store: RawStore) -> Iterator[RecordAttack]:
        for address in store.addresses():
            for path, value, changed in _changed_records(store.read(address)):
                attack = RecordAttack(_name_of(address), path, address, value)
                attack.store, attack.changed = store, changed
                yield attack

    def make(self) -> bool:
        self.store.write(self.row, self.changed())
        return True


def _name_of(address: Address) -> str:
    """The name of a place; of a file without its folders, whose names say nothing."""
    return "/".join(
        part.decode(errors="replace") if isinstance(part, bytes) else Path(str(part)).name
        for part in address
    )


def _changed_records(record: bytes) -> Iterator[tuple[str, Any, Callable[[], bytes]]]:
    """The record with one absurd value: where, which, and a function that returns the record."""
    try:
        decoded = msgspec.msgpack.decode(record)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        decoded = None
    if isinstance(decoded, list | dict):
        for path in _paths(decoded):
            for value in _ANY:
                yield str(path), value, partial(_encoded_with, decoded, path, value)
    for number, part in enumerate(re.split(rb"([0-9]+|[/ \n])", record)[:60]):
        if part.isdigit():
            for value in (b"", b"x", b"-1", b"9" * 30, b"1e308", b"nan"):
                yield f"text {number}", value, partial(record.replace, part, value, 1)
    for value in (b"", b"\xff", b"x", record[:-1], record * 2):
        yield "all", value, partial(bytes, value)


def _encoded_with(record: Any, path: tuple[Any, ...], value: Any) -> bytes:
    return msgspec.msgpack.encode(_replaced(record, path, value))


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if above:
        yield above
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, list | dict):
            yield from _paths(item, (*above, key))
        else:
            yield (*above, key)


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = _replaced(value[path[0]], path[1:], new)
    return changed


def attacks_on(store: RawStore) -> Iterator[Attack]:
    if isinstance(store, RawSQLiteStore):
        return SQLiteAttack.all(store)
    if isinstance(store, RawPostgresStore):
        return PostgresAttack.all(store)
    return RecordAttack.all(store)


async def survives(url: str, settings: Settings, *, may_refuse: bool) -> str | None:
    """What is wrong with the store and its worker; None if a new task runs and every list works."""
    try:
        async with AsyncTaskQueue(url, settings=settings) as queue:
            await use(queue.storage)
            handle = await queue.enqueue(sample_tasks.good, 1)
            async with queue.worker(concurrency=4, poll_interval=0.05):
                if await handle.result(timeout=15) != 2:
                    return "another result"
            await queue.storage.list_tasks()
            await queue.storage.list_dead()
            await queue.storage.list_schedules()
            await queue.storage.stats()
    except OmniqError as error:
        return None if may_refuse else f"refused: {error!r}"
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return f"raised: {error!r}"
    return None


async def try_attacks(url: str, count: int, seed: int) -> tuple[int, list[str]]:
    """How many attacks the database admitted, and what each has broken."""
    settings = Settings(durability="os")
    async with open_storage(url, settings=settings) as storage:
        await fill(storage)
    raw = raw_store_of(url)
    restore = raw.save()
    draw = random.Random(seed)
    chosen = list(attacks_on(raw))
    draw.shuffle(chosen)
    made, broken = 0, []
    for attack in chosen:
        if made >= count:
            break
        if not attack.make():
            continue
        made += 1
        place = attack.table if isinstance(attack, RecordAttack) else f"{attack.table}/{attack.row}"
        may_refuse = bool(_OF_THE_STORE.search(place))
        wrong = await survives(url, settings, may_refuse=may_refuse)
        if wrong is not None:
            broken.append(f"{attack}: {wrong}")
        restore()
    raw.close()
    return made, broken


@pytest.mark.security("S39")
@pytest.mark.timeout(240)
async def test_an_absurd_value_in_any_field_stops_nothing(store_url):
    made, broken = await try_attacks(store_url, 12, seed=1)

    assert made == 12
    assert broken == []


@pytest.mark.deep
@pytest.mark.security("S39")
@pytest.mark.timeout(600)
async def test_200_absurd_values_in_any_field_stop_nothing(store_url):
    made, broken = await try_attacks(store_url, 200, seed=2)

    assert made == 200
    assert broken == []


@pytest.mark.security("S39")
async def test_a_damaged_dead_letter_is_one_damaged_dead_letter(store_url):
    async with open_storage(store_url) as storage:
        await storage.enqueue_many([a_task(name) for name in ("good", "bad")])
        for task in await storage.reserve(2):
            error = an_error(f"the error of {task.id}")
            await storage.record([Failed(task.id, task.token, error, "for good")])
    raw = raw_store_of(store_url)
    for address in raw.addresses():
        data = raw.read(address)
        if b"the error of bad" in data and b"the error of good" not in data:
            raw.write(address, b"\xffnot a record")
    raw.close()

    async with open_storage(store_url) as storage:
        # Files and Redis leave it out; on files it is in the folder `corrupt`.
        listed = {letter.task_id: letter for letter in await storage.list_dead()}
        assert listed["good"].failure_reason == "for good"
        assert "bad" not in listed or listed["bad"].failure_reason == "damaged"
        await storage.get_dead("bad")
        await storage.delete_dead("bad")
        assert await storage.get_dead("bad") is None
        assert [letter.task_id for letter in await storage.list_dead()] == ["good"]
        assert await storage.retry_dead("good")
