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
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.postgres.upgrade import convert_documents

NEWEST = len(statements.migrations())
"""The version of the schema that this code works with."""

_OLDEST_SERVER = 13


class ServerInfo(msgspec.Struct, frozen=True):
    """What a storage reads from the server when it is opened."""

    version: int
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


_SERVER_QUERY = (
    "SELECT max(version), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, "
    "current_setting('fsync'), current_setting('synchronous_commit'), "
    "current_setting('full_page_writes') FROM {schema}.versions"
)


async def read_server(db: Connection, names: SchemaNames) -> ServerInfo:
    """Read the schema's version, the store's id, and the settings that decide durability."""
    found = ServerInfo(*await db.fetchrow(names(_SERVER_QUERY)))
    if found.version != NEWEST:
        return found
    sql = "SELECT data FROM {schema}.documents WHERE kind = 'store' AND key = 'store'"
    data = await db.fetchval(names(sql))
    record = decode_record(data)
    check_reader(record)
    if record is None:
        return found
    # The encoded record begins with the id.
    identity = data[: 1 + len(encode_internal(record.id))].hex()
    return msgspec.structs.replace(found, store=identity)


def check_version(target: Target, version: int) -> None:
    """Raise `StorageRefused` when the schema's version is not the one that this code works with."""
    where = f"{target}, schema {target.schema}"
    if version == 0:
        raise StorageRefused(f"{where}: is not set up; run 'omniq schema install'")
    if version > NEWEST:
        raise StorageRefused(
            f"{where}: is at version {version}, and this omniq knows versions up to {NEWEST}; "
            "use a newer omniq"
        )
    if version < NEWEST:
        raise StorageRefused(
            f"{where}: is at version {version}, and this omniq needs {NEWEST}; "
            "run 'omniq schema upgrade'"
        )


async def read_version(target: Target) -> int:
    """Return the schema's version; 0 when it is not installed."""
    async with _connected(target) as db:
        return await _version(db, target.schema)


@asynccontextmanager
async def _connected(target: Target) -> AsyncIterator[Connection]:
    """A connection; errors of the driver are raised as `StorageError`."""
    db = await target.connect("schema")
    try:
        with target.wrapped_errors():
            yield db
    finally:
        await close(db)


async def _version(db: Connection, schema: str) -> int:
    names = SchemaNames(schema)
    if await db.fetchval("SELECT to_regclass($1)", names("{schema}.versions")) is None:
        return 0
    version: int = await db.fetchval(
        names("SELECT coalesce(max(version), 0) FROM {schema}.versions")
    )
    return version


async def upgrade(target: Target) -> int:
    """Upgrade the schema to the newest version in one transaction; returns the version before.

    Concurrent upgrades are safe: they wait for each other.
    """
    names = SchemaNames(target.schema)
    async with _connected(target) as db, db.transaction():
        await db.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"omniq {target.schema}"
        )
        _check_server(db, target)
        if await db.fetchval("SELECT to_regnamespace($1)", f'"{target.schema}"') is None:
            await db.execute(names("CREATE SCHEMA {schema}"))
        before = await _version(db, target.schema)
        if before > NEWEST:
            check_version(target, before)
        if before < NEWEST:
            await _apply(db, target.schema, before)
        return before


async def _apply(db: Connection, schema: str, before: int) -> None:
    """Run the missing migrations, and install the functions of the newest version.

    CREATE OR REPLACE FUNCTION cannot rename parameters: those of installed functions must stay.
    """
    names = SchemaNames(schema)
    if before == 0:
        await db.execute(names(_VERSIONS))
    for version, name in enumerate(statements.migrations()[before:], start=before + 1):
        await db.execute(statements.migration(schema, name))
        if version == 4 and before > 0:
            await convert_documents(db, names)
        await db.execute(names("INSERT INTO {schema}.versions VALUES ($1)"), version)
    await db.execute(statements.functions(schema))


_VERSIONS = (
    "CREATE TABLE {schema}.versions (version int PRIMARY KEY, "
    "applied_at timestamptz NOT NULL DEFAULT now())"
)


def _check_server(db: Connection, target: Target) -> None:
    version = db.get_server_version()
    if version.major < _OLDEST_SERVER:
        raise StorageRefused(
            f"{target}: is PostgreSQL {version.major}; {_OLDEST_SERVER} or newer is needed"
        )


def install_sql(schema: str) -> str:
    """The SQL that `upgrade` would run on an empty database, to be read or run by hand."""
    names = SchemaNames(schema)
    parts = [names("CREATE SCHEMA IF NOT EXISTS {schema};"), names(_VERSIONS + ";")]
    for version, name in enumerate(statements.migrations(), start=1):
        parts.append(statements.migration(schema, name))
        parts.append(names(f"INSERT INTO {{schema}}.versions VALUES ({version});"))
    parts.append(statements.functions(schema))
    return "\n".join(("BEGIN;", *parts, "COMMIT;")) + "\n"
