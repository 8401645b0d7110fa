"""Storage: tasks in a PostgreSQL database that any number of machines share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import StorageError
from omniq.models import TaskResult
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.postgres import migrations
from omniq.storage.postgres.backend import PostgresBackend
from omniq.storage.postgres.connection import ReplyLost, Target, WriteRefused
from omniq.storage.postgres.enqueue_in_parts import PART_SIZE, LargeBatch, enqueue_in_parts
from omniq.storage.postgres.server_check import Finding, report
from omniq.storage.row_rules import Row

_NOTIFIED_PAUSE = 2.0
"""The longest pause between two polls for a result of whose end the server notifies this storage."""


class PostgresStorage(BaseStorage):
    """A store in one schema of the database at `url`.

    `poll_only` is for a pooler that gives every transaction a different session (PgBouncer): no
    statement is prepared and no connection listens. `pool_size` bounds the connections for
    `transaction`; besides them there are at most five: two to write, and one each to read, to count
    and vacuum, and to listen.
    """

    _backend: PostgresBackend

    def __init__(
        self,
        url: str,
        *,
        schema: str = "omniq",
        poll_only: bool = False,
        pool_size: int = 10,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self._target = Target(url, schema, clock, poll_only=poll_only)
        self._use(PostgresBackend(self._target, pool_size, clock, self._local_wakeups))
        self._pid = 0

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()
        self._enqueue_batcher = EnqueueBatcher(super()._enqueue)
        await super()._open()

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork the connections and claims are the parent's: neither is touched.
            self._is_open = False
            self._forget_claims()
            return
        await super().close()

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"{self._target}: opened by process {self._pid}, and used in process "
                f"{os.getpid()} after a fork; open a separate storage in each process"
            )

    # The schema; the storage need not be open

    def schema_sql(self) -> str:
        """Return the SQL that sets up an empty database."""
        return migrations.install_sql(self._target.schema)

    async def check_schema(self) -> int:
        """Return the schema's version; raises `StorageRefused` when another version is needed."""
        version = await migrations.read_version(self._target)
        migrations.check_version(self._target, version)
        return version

    async def upgrade_schema(self) -> tuple[int, int]:
        """Upgrade the schema to the newest version; returns the versions before and after."""
        return await migrations.upgrade(self._target), migrations.NEWEST

    async def server_report(self) -> list[Finding]:
        """Check the server's settings: name, value, and "ok", "warn: …" or "bad: …" of each."""
        self._check_open()
        return await self._backend.read(lambda db: report(db, self._clock.micros()))

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        self._check_open()
        if _have_records(rows):
            return await self._enqueue_batcher.add(rows)
        return await super()._enqueue(rows)

    async def _enqueue_all(self, rows: Iterator[Row]) -> list[str]:
        first = list(islice(rows, PART_SIZE))
        if len(first) < PART_SIZE:
            return await self._enqueue(first) if first else []
        self._check_open()
        backend, batch = self._backend, LargeBatch(first, rows)
        try:
            return await backend.write(
                lambda db: enqueue_in_parts(
                    db,
                    backend.names,
                    batch,
                    self._engine.insertion,
                    backend.clock.now(),
                    self._clock,
                )
            )
        except WriteRefused:
            # An id or a unique key is taken, perhaps by the same call before: the engine knows.
            return await super()._enqueue(batch.all())
        except ReplyLost:
            if not _have_records(batch.all()):
                raise
            return await super()._enqueue(batch.all())

    # Waiting

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        self._check_open()
        async with self._backend.wakeups.awaiting_result(task_id) as is_notified:
            self._longest_pause = _NOTIFIED_PAUSE if is_notified else BaseStorage._longest_pause
            return await super().wait_for_result(task_id, timeout)


def _have_records(rows: list[Row]) -> bool:
    """Whether a repeated enqueue can recognize by their records what the first call enqueued.

    A task without a record (`result_ttl` 0) may have run and been deleted meanwhile.
    """
    return all(row.result_ttl > 0 for row in rows)
