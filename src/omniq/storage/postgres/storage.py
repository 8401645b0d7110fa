"""Storage: tasks in a PostgreSQL database that any number of machines share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from omniq.errors import QueueFull
from omniq.storage.backend import Moved, largest_value
from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.flow_insertion import Under
from omniq.storage.postgres import migrations
from omniq.storage.postgres.backend import PostgresBackend
from omniq.storage.postgres.connection import ReplyLost, Target
from omniq.storage.postgres.enqueue import PART_SIZE, LargeBatch, enqueue_in_parts
from omniq.storage.postgres.server_check import Finding, report
from omniq.storage.row_rules import Row


class PostgresStorage(BaseStorage):
    """A store in one schema of the database at `url`.

    `poll_only` is for a pooler that gives every transaction a different session (PgBouncer): no
    statement is prepared and no connection listens. `pool_size` bounds the connections for
    `transaction`; besides them there are at most five: two to write, and one each to read, to count
    and vacuum, and to listen. What is not given comes from the settings.
    """

    _backend: PostgresBackend
    _enqueue_writes = 1
    # A task without a record may have run and been deleted when its enqueue is repeated.
    _joined_ttl = 1

    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        poll_only: bool | None = None,
        pool_size: int | None = None,
        **options: Unpack[StorageOptions],
    ) -> None:
        super().__init__(**options)
        settings = self._settings
        schema = settings.schema if schema is None else schema
        poll_only = settings.poll_only if poll_only is None else poll_only
        pool_size = settings.pool_size if pool_size is None else pool_size
        largest = largest_value(settings.max_payload)
        self._target = Target(
            url,
            schema,
            self._clock,
            poll_only=poll_only,
            largest=largest,
            reconnect_timeout=settings.reconnect_timeout,
        )
        self._use(PostgresBackend(self._target, pool_size, self._clock, self._local_wakeups))

    # The schema; the storage need not be open

    def schema_sql(self) -> str:
        """Return the SQL that sets up an empty database."""
        return migrations.install_sql(self._target.schema)

    async def check_schema(self) -> int:
        """Return the schema's version; raises `StorageRefused` when another version is needed."""
        return await migrations.check_schema(self._target)

    async def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade the schema to the newest version; returns the versions before and after."""
        return await migrations.upgrade(self._target), migrations.NEWEST

    async def server_report(self) -> list[Finding]:
        """Check the server's settings: name, value, and "ok", "warn: …" or "bad: …" of each."""
        self._check_open()
        return await report(self._backend.reader)

    async def _enqueue(self, rows: Iterator[Row], under: Under | None) -> list[str]:
        batch = LargeBatch(rows)
        first = batch.part(0)
        if len(first) < PART_SIZE:
            return await super()._enqueue(iter(first), under)
        if under is not None or any(row.workflow is not None for row in batch.all()):
            return await self._engine.enqueue(batch.all(), under=under)
        schema, insertion, now = (
            self._target.schema,
            self._engine.free_insertion,
            self._clock.micros(),
        )
        try:
            return await self._backend.free_writer().run(
                lambda db: enqueue_in_parts(db, schema, batch, insertion, now, self._clock)
            )
        except (Moved, QueueFull):
            # An id or a unique key is taken, perhaps by the same call before: the engine knows.
            pass
        except ReplyLost:
            # The engine recognizes by their records what this call has enqueued.
            if any(row.result_ttl < self._joined_ttl for row in batch.all()):
                raise
        return await self._engine.enqueue(batch.all())
