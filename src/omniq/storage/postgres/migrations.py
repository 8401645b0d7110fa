"""Migrations: installs, upgrades and checks the schema's tables and functions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from omniq.errors import StorageRefused
from omniq.serialization import encode_internal
from omniq.storage.incarnation import check_reader, decode_record
from omniq.storage.postgres import statements
from omniq.storage.postgres.connection import Connection, Target, close
from omniq.storage.postgres.statements import SEARCH_PATH, Statements, filled
from omniq.storage.postgres.upgrade import convert_documents

NEWEST = len(statements.migrations())
"""The version of the schema that this code works with."""

_OLDEST_SERVER = 13
_FIRST_WITH_DOCUMENTS = 4

# A column that the schema does not have yet is NULL in JSON.
_SERVER_QUERY = (
    "SELECT version, (pg_catalog.to_jsonb(versions) ->> 'oldest')::int, "
    "(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint, "
    "pg_catalog.current_setting('fsync'), pg_catalog.current_setting('synchronous_commit'), "
    "pg_catalog.current_setting('full_page_writes') "
    "FROM {schema}.versions ORDER BY version DESC LIMIT 1"
)
_STORE_QUERY = "SELECT data FROM {schema}.documents WHERE kind = 'store' AND key = 'store'"
_VERSIONS = (
    "CREATE TABLE {schema}.versions (version int PRIMARY KEY, "
    "applied_at timestamptz NOT NULL DEFAULT now())"
)
# Until the end of the transaction: also for a connection that has other settings.
_PIN = f"SET LOCAL search_path = {SEARCH_PATH}"


class ServerInfo(msgspec.Struct, frozen=True):
    """What a storage reads from the server when it is opened.

    `version` is that of the schema, and `oldest` the oldest version whose workers can use it.
    """

    version: int
    oldest: int | None
    now: int
    fsync: str
    synchronous_commit: str
    full_page_writes: str
    store: str = ""

    @property
    def survives_power_cut(self) -> bool:
        """Whether acknowledged writes are on disk."""
        return (
            self.fsync == "on"
            and self.full_page_writes == "on"
            and self.synchronous_commit != "off"
        )


async def read_server(store: Statements) -> ServerInfo:
    """Read the schema's version, the store's id, and the settings that decide durability."""
    (line,) = await store.fetch(_SERVER_QUERY)
    found = ServerInfo(*line)
    if found.version < _FIRST_WITH_DOCUMENTS:
        return found
    data = b"".join([data for (data,) in await store.fetch(_STORE_QUERY)])
    record = decode_record(data)
    check_reader(record)
    if record is None:
        return found
    # The encoded record begins with the id.
    identity = data[: 1 + len(encode_internal(record.id))].hex()
    return msgspec.structs.replace(found, store=identity)


def check_version(target: Target, version: int, oldest: int | None = None) -> None:
    """Raise `StorageRefused` when this code cannot work with a schema of that version.

    A newer one is accepted if `oldest`, the oldest version whose workers can use it, is known here.
    """
    where = f"{target}, schema {target.schema}"
    if version == 0:
        raise StorageRefused(f"{where}: is not set up; run 'omniq schema install'")
    if version > NEWEST and (oldest is None or oldest > NEWEST):
        raise StorageRefused(
            f"{where}: is at version {version}, and this omniq knows versions up to {NEWEST}; "
            "use a newer omniq"
        )
    if version < NEWEST:
        raise StorageRefused(
            f"{where}: is at version {version}, and this omniq needs {NEWEST}; "
            "run 'omniq schema upgrade'"
        )


async def check_schema(target: Target) -> int:
    """Return the schema's version. Raises `StorageRefused` when this code cannot work with it."""
    async with _connected(target) as db:
        version, oldest = await _version(db, target.schema)
    check_version(target, version, oldest)
    return version


@asynccontextmanager
async def _connected(target: Target) -> AsyncIterator[Connection]:
    """A connection; errors of the driver are raised as `StorageError`."""
    db = await target.connect("schema")
    try:
        with target.wrapped_errors():
            yield db
    finally:
        await close(db)


async def _version(db: Connection, schema: str) -> tuple[int, int | None]:
    """The schema's version and the oldest one whose workers can use it; 0 when it is not installed."""
    sql = "SELECT pg_catalog.to_regclass($1)"
    if await db.fetchval(sql, filled(schema, "{schema}.versions")) is None:
        return 0, None
    found = await db.fetchrow(filled(schema, _SERVER_QUERY))
    return (0, None) if found is None else (found[0], found[1])


async def upgrade(target: Target) -> int:
    """Upgrade the schema to the newest version in one transaction; returns the version before.

    Concurrent upgrades are safe: they wait for each other.
    """
    schema = target.schema
    async with _connected(target) as db, db.transaction():
        await db.execute(_PIN)
        await db.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended($1, 0::bigint))", f"omniq {schema}"
        )
        _check_server(db, target)
        if await db.fetchval("SELECT to_regnamespace($1)", f'"{schema}"') is None:
            await db.execute(filled(schema, "CREATE SCHEMA {schema}"))
        before, oldest = await _version(db, schema)
        if before > NEWEST:
            check_version(target, before, oldest)
        if before < NEWEST:
            await _apply(db, schema, before)
        return before


async def _apply(db: Connection, schema: str, before: int) -> None:
    """Run the missing migrations, and install the functions of the newest version.

    CREATE OR REPLACE FUNCTION cannot rename parameters: those of installed functions must stay.
    """
    if before == 0:
        await db.execute(filled(schema, _VERSIONS))
    for version, name in enumerate(statements.migrations()[before:], start=before + 1):
        await db.execute(statements.migration(schema, name))
        if version == _FIRST_WITH_DOCUMENTS and before > 0:
            await convert_documents(db, schema)
        await db.execute(filled(schema, "INSERT INTO {schema}.versions VALUES ($1)"), version)
    await db.execute(statements.functions(schema))


def _check_server(db: Connection, target: Target) -> None:
    version = db.get_server_version()
    if version.major < _OLDEST_SERVER:
        raise StorageRefused(
            f"{target}: is PostgreSQL {version.major}; {_OLDEST_SERVER} or newer is needed"
        )


def install_sql(schema: str) -> str:
    """The SQL that `upgrade` would run on an empty database, to be read or run by hand."""
    parts = [f"{_PIN};", "CREATE SCHEMA IF NOT EXISTS {schema};", f"{_VERSIONS};"]
    for version, name in enumerate(statements.migrations(), start=1):
        parts.append(statements.migration(schema, name))
        parts.append(f"INSERT INTO {{schema}}.versions VALUES ({version});")
    parts.append(statements.functions(schema))
    return filled(schema, "\n".join(("BEGIN;", *parts, "COMMIT;")) + "\n")
