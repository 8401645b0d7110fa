"""The PostgreSQL backend keeps the whole contract; transactions on every driver it knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omniq.testing.contract import ContractPart, StorageContract, TransactionContract, opener
from tests.storage.orphaned_checkpoints import OrphanedCheckpointTests
from tests.storage.postgres_stores import Schema
from tests.storage.postgres_users import (
    AsyncPsycopg,
    AsyncSQLAlchemy,
    AsyncSQLAlchemySession,
    PostgresUser,
    Psycopg,
    PsycopgOfDictionaries,
    SQLAlchemy,
    SQLAlchemySession,
)
from tests.storage.rate_wakeups import RateWakeupTests


@pytest.fixture(scope="module")
def schema(postgres_server_url: str) -> Iterator[Schema]:
    schema = Schema(postgres_server_url)
    yield schema
    schema.drop()


class OnPostgres:
    driver = PostgresUser

    @pytest.fixture
    async def open_another(self, clock, schema):
        schema.wipe()

        def make(**options):
            return schema.new_storage(clock=clock, **options)

        async with opener(make) as open_another:
            yield open_another

    @pytest.fixture
    async def user_connection(self, schema):
        user = await self.driver(schema).open()
        yield user
        await user.close()


class TestPostgres(OnPostgres, OrphanedCheckpointTests, RateWakeupTests, StorageContract):
    """With asyncpg for the user's own connection."""

    @pytest.fixture
    def copy_checkpoint(self, schema):
        async def copy(source, target):
            table = f'"{schema.name}".documents'
            schema.execute(
                f"INSERT INTO {table} SELECT kind, '{target}', due, data FROM {table} "
                f"WHERE kind = 'checkpoint' AND key = '{source}'"
            )

        return copy


def _tests_of(*promises: str) -> dict[str, object]:
    return {
        name: test
        for name, test in vars(TransactionContract).items()
        if set(promises) & set(getattr(test, "promises", ()))
    }


class OnDriver(OnPostgres, ContractPart):
    """Enqueueing on a user's connection. What a task does in a transaction is the same for all."""

    user = TransactionContract.user
    locals().update(_tests_of("N1", "N2", "N3"))
    __test__ = False


class TestPsycopg(OnDriver):
    __test__ = True
    driver = Psycopg


class TestPsycopgOfDictionaries(OnDriver):
    __test__ = True
    driver = PsycopgOfDictionaries


class TestAsyncPsycopg(OnDriver):
    __test__ = True
    driver = AsyncPsycopg


class TestSQLAlchemy(OnDriver):
    __test__ = True
    driver = SQLAlchemy


class TestSQLAlchemySession(OnDriver):
    __test__ = True
    driver = SQLAlchemySession


class TestAsyncSQLAlchemy(OnDriver):
    __test__ = True
    driver = AsyncSQLAlchemy


class TestAsyncSQLAlchemySession(OnDriver):
    __test__ = True
    driver = AsyncSQLAlchemySession
