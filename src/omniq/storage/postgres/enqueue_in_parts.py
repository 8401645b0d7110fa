"""Enqueue in parts: a large batch in one transaction; the server inserts one part while the next is built."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from omniq.clock import Clock
from omniq.storage.backend import Changes
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.section import enqueue_parameters
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import Row

PART_SIZE = 250
"""The number of tasks in a part."""


class LargeBatch:
    """Many rows, built as they are needed, and retained in case the transaction is repeated."""

    def __init__(self, rows: list[Row], unbuilt: Iterator[Row]) -> None:
        self._rows = rows
        self._unbuilt = unbuilt
        self._error: Exception | None = None

    def all(self) -> list[Row]:
        """Build and return all rows. Raises the error of a row that could not be built."""
        self._build(None)
        return self._rows

    def parts(self) -> Iterator[list[Row]]:
        """`PART_SIZE` rows at a time."""
        start = 0
        while True:
            if start == len(self._rows):
                self._build(PART_SIZE)
            part = self._rows[start : start + PART_SIZE]
            if not part:
                return
            start += len(part)
            yield part

    def _build(self, count: int | None) -> None:
        # A generator that has raised would look exhausted: raise its error again instead.
        if self._error is not None:
            raise self._error
        try:
            self._rows += islice(self._unbuilt, count)
        except Exception as error:
            self._error = error
            raise


async def enqueue_in_parts(
    db: Connection,
    names: SchemaNames,
    batch: LargeBatch,
    insertion: Callable[[list[Row]], tuple[Changes, list[str]]],
    now: int,
    clock: Clock,
) -> list[str]:
    """Insert all rows, and return their ids.

    `WriteRefused` if one of their ids or unique keys is taken, or if there are too many.
    """
    sql = names.select("enqueue", 6, first="bigint")
    parts = batch.parts()
    ids: list[str] = []

    def next_parameters() -> tuple[Any, ...] | None:
        part = next(parts, None)
        if part is None:
            return None
        changes, part_ids = insertion(part)
        ids.extend(part_ids)
        # Notifies in any case: a storage may begin to wait before this is committed.
        return enqueue_parameters(now, changes, is_certain=True)

    async def build_next() -> tuple[Any, ...] | None:
        # Lets the insert of the part before be sent first.
        await clock.sleep(0)
        return next_parameters()

    async with db.transaction():
        parameters = next_parameters()
        while parameters is not None:
            # Both are awaited even if one fails: a connection can run one statement at a time.
            done, parameters = await asyncio.gather(
                db.fetch(sql, *parameters), build_next(), return_exceptions=True
            )
            for outcome in (done, parameters):
                if isinstance(outcome, BaseException):
                    raise outcome
    return ids
