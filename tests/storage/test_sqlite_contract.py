"""The SQLite backend passes the whole contract, and its core with every write synced to disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from omniq.settings import Settings
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.contract import (
    ClaimContract,
    LeaseContract,
    LifecycleContract,
    RecordContract,
    StorageContract,
    opener,
)
from tests.storage.orphaned_checkpoints import OrphanedCheckpointTests
from tests.storage.rate_wakeups import RateWakeupTests


class UserConnection:
    """A user's connection to the database, and a table of the user."""

    def __init__(self, path):
        self.path = path
        self.connection = sqlite3.connect(path)
        self.connection.execute("CREATE TABLE notes (note TEXT)")
        self.others = []

    async def begin(self):
        assert not self.connection.in_transaction

    async def commit(self):
        self.connection.commit()

    async def roll_back(self):
        self.connection.rollback()

    async def write(self, note, connection=None):
        self.write_blocking(note, connection or self.connection)

    def write_blocking(self, note, connection):
        connection.execute("INSERT INTO notes VALUES (?)", (note,))

    async def notes(self):
        with closing(sqlite3.connect(self.path)) as reader:
            return [note for (note,) in reader.execute("SELECT note FROM notes ORDER BY note")]

    async def autocommit_connection(self):
        return self.connect(self.path, isolation_level=None)

    async def other_database_connection(self):
        connection = self.connect(":memory:")
        connection.execute("BEGIN")
        return connection

    def connect(self, path, **options):
        self.others.append(sqlite3.connect(path, **options))
        return self.others[-1]

    def close(self):
        for connection in (self.connection, *self.others):
            connection.close()


class TestSQLite(RateWakeupTests, OrphanedCheckpointTests, StorageContract):
    @pytest.fixture
    def copy_checkpoint(self, tmp_path):
        async def copy(source, target):
            with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
                connection.execute(
                    "INSERT INTO omniq_documents SELECT kind, ?, data, due FROM omniq_documents "
                    "WHERE kind = 'checkpoint' AND key = ?",
                    (target, source),
                )

        return copy

    @pytest.fixture
    async def user_connection(self, storage, tmp_path):
        with closing(UserConnection(tmp_path / "tasks.db")) as user_connection:
            yield user_connection

    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="os")
            return SQLiteStorage(tmp_path / "tasks.db", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another


class TestSQLiteSynced(LifecycleContract, ClaimContract, RecordContract, LeaseContract):
    @pytest.fixture
    async def open_another(self, clock, tmp_path):
        def make(settings=None, **options):
            chosen = replace(settings or Settings(), durability="power")
            return SQLiteStorage(tmp_path / "tasks.db", clock=clock, settings=chosen, **options)

        async with opener(make) as open_another:
            yield open_another
