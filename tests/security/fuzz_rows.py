"""Thousands of rows, each with one absurd value, while a worker runs: good tasks run, and every list works.

python -m tests.security.fuzz_rows               20,000 rows on each kind of storage
python -m tests.security.fuzz_rows 2000 sqlite   fewer, on one
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omniq import AsyncTaskQueue
from omniq.errors import OmniqError
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.testing.servers import PostgresServer, RedisServer
from tests.security import sample_tasks
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import (
    RAW_STORES,
    RawPostgresStore,
    RawSQLiteStore,
    RawStore,
    fill,
    use_all,
)
from tests.security.test_fields import (
    _ANY,
    _OF_THE_STORE,
    _POSTGRES_VALUES,
    Attack,
    PostgresAttack,
    RecordAttack,
    SQLiteAttack,
    _changed_records,
    _name_of,
)

_COPIES = 100
_GOOD = 20
_SETTINGS = Settings(durability="os")


async def fuzz_rows(url: str, rows: int, seed: int) -> tuple[int, list[str]]:
    """Change that many values in as many rows; returns how many were changed, and what that has broken."""
    draw = random.Random(seed)
    made, broken = 0, []
    async with open_storage(url, settings=_SETTINGS) as storage:
        await fill(storage, [f"-{number}" for number in range(_COPIES)])
    raw = raw_store_of(url)
    restore = raw.save()
    while made < rows:
        attacks = [attack for attack in _one_attack_a_row(raw, draw) if attack.make()]
        assert attacks
        made += len(attacks)
        wrong = await _what_is_wrong(url)
        if wrong is not None:
            broken.append(f"seed {seed}, after {made} rows: {wrong}")
        restore()
    raw.close()
    return made, broken


async def _what_is_wrong(url: str) -> str | None:
    try:
        async with AsyncTaskQueue(url, settings=_SETTINGS) as queue:
            storage = queue.storage
            async with queue.worker(concurrency=4, poll_interval=0.05):
                handles = [await queue.enqueue(sample_tasks.good, n) for n in range(_GOOD)]
                for handle in handles:
                    await handle.result(timeout=30)
            await use_all(storage, ["-0"])
            for read in (storage.list_tasks, storage.list_dead, storage.list_schedules):
                await read()
            await storage.stats()
    except OmniqError as error:
        return f"refused: {error!r}"
    except Exception as error:
        return f"raised: {error!r}"
    return None


def _one_attack_a_row(raw: RawStore, draw: random.Random) -> Iterator[Attack]:
    """One absurd value in each row that does not describe the whole store."""
    if isinstance(raw, RawSQLiteStore):
        yield from _on_sqlite(raw, draw)
    elif isinstance(raw, RawPostgresStore):
        yield from _on_postgres(raw, draw)
    else:
        for address in raw.addresses():
            if _OF_THE_STORE.search(_name_of(address)):
                continue
            changes = list(_changed_records(raw.read(address)))
            path, value, changed = draw.choice(changes)
            attack = RecordAttack(_name_of(address), path, address, value)
            attack.store, attack.changed = raw, changed
            yield attack


def _on_sqlite(raw: RawSQLiteStore, draw: random.Random) -> Iterator[Attack]:
    # A program that writes to the file can turn the CHECKs of the tables off.
    raw._db.execute(f"PRAGMA ignore_check_constraints = {draw.choice(('ON', 'OFF'))}")
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'omniq%'"
    for (table,) in raw._db.execute(names).fetchall():
        columns = [each[1] for each in raw._db.execute(f"PRAGMA table_info({table})")]
        key = raw._key(table) or "rowid"
        for (row,) in raw._db.execute(f"SELECT {key} FROM {table} ORDER BY 1").fetchall():
            if not _OF_THE_STORE.search(f"{table}/{row}"):
                attack = SQLiteAttack(table, draw.choice(columns), row, draw.choice(_ANY))
                attack.store = raw
                yield attack


def _on_postgres(raw: RawPostgresStore, draw: random.Random) -> Iterator[Attack]:
    found: dict[str, list[tuple[str, str]]] = {}
    for table, column, kind in raw._all(
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = %s ORDER BY 1, 2",
        raw.schema,
    ):
        found.setdefault(table, []).append((column, kind))
    for table in ("live", "finished", "dead", "documents"):
        for (row,) in raw._all(f'SELECT {raw._key(table)} FROM "{raw.schema}".{table} ORDER BY 1'):
            if not _OF_THE_STORE.search(f"{table}/{row}"):
                column, kind = draw.choice(found[table])
                value = draw.choice(_POSTGRES_VALUES.get(kind, (None,)))
                attack = PostgresAttack(table, column, row, value)
                attack.store = raw
                yield attack


@contextmanager
def _store(kind: str) -> Iterator[str]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        match kind:
            case "sqlite":
                yield f"sqlite:///{folder}/store.db?durability=os"
            case "file":
                yield f"file://{folder}/files?durability=os"
            case "postgres":
                yield f"{stack.enter_context(PostgresServer()).url}?schema=fuzzed"
            case _:
                yield f"{stack.enter_context(RedisServer()).url}?prefix=fuzzed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=20_000)
    parser.add_argument("stores", nargs="*", default=[*RAW_STORES])
    parser.add_argument("--seed", type=int, default=7)
    given: Any = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    failed = False
    for kind in given.stores:
        began = time.monotonic()
        with _store(kind) as url:
            made, broken = asyncio.run(fuzz_rows(url, given.rows, given.seed))
        sys.stdout.write(
            f"{kind}: {made} rows in {time.monotonic() - began:.0f} s, {len(broken)} broken\n"
        )
        for line in broken:
            sys.stdout.write(f"  {line}\n")
        failed = failed or bool(broken)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
