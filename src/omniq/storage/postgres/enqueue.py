"""Enqueue: inserts new tasks with one call.

A large batch is one transaction of several calls: the server inserts one part while the next is built.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from omniq.clock import Clock
from omniq.storage.backend import Changes, Moved
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import Connection, ReplyLost
from omniq.storage.postgres.statements import Statements, call_of
from omniq.storage.row_rules import Row

PART_SIZE = 250
"""The number of tasks in a part."""


async def enqueue(statements: Statements, now: int, changes: Changes) -> None:
    """Insert new rows and their documents.

    `Moved` if one of their ids or unique keys is taken, `QueueFull` if there are too many.
    """
    try:
        if len(changes.inserted) == 1 and changes.bound is None and not changes.documents:
            task = encoding.new_task(changes.inserted[0])
            await statements.call_once("enqueue_one", now, task)
        else:
            await statements.call_once("enqueue", *enqueue_parameters(now, changes))
    except ReplyLost:
        # Records show what was enqueued already. A task without one may have run and be gone.
        if all(row.result_ttl > 0 for row in changes.inserted):
            raise Moved from None
        raise


def enqueue_parameters(now: int, changes: Changes, *, is_certain: bool = False) -> tuple[Any, ...]:
    """The parameters of the SQL function `enqueue`."""
    rows = changes.inserted
    return (
        now,
        encoding.new_tasks(rows),
        min([row.visible for row in rows]),
        changes.bound,
        encoding.document_changes(changes.documents) if changes.documents else [],
        is_certain,
    )


class LargeBatch:
    """Many rows, built as they are needed, and retained in case the transaction is repeated."""

    def __init__(self, unbuilt: Iterator[Row]) -> None:
        self._rows: list[Row] = []
        self._unbuilt = unbuilt
        self._error: Exception | None = None

    def all(self) -> list[Row]:
        """Build and return all rows. Raises the error of a row that could not be built."""
        self._build(None)
        return self._rows

    def part(self, number: int) -> list[Row]:
        """The rows of a part; the parts before it are built. None are behind the last part."""
        start = number * PART_SIZE
        if start == len(self._rows):
            self._build(PART_SIZE)
        return self._rows[start : start + PART_SIZE]

    def _build(self, size: int | None) -> None:
        # A generator that has raised would look exhausted: raise its error again instead.
        if self._error is not None:
            raise self._error
        try:
            self._rows += islice(self._unbuilt, size)
        except Exception as error:
            self._error = error
            raise


async def enqueue_in_parts(
    db: Connection,
    schema: str,
    batch: LargeBatch,
    insertion: Callable[[list[Row]], tuple[Changes, list[str]]],
    now: int,
    clock: Clock,
) -> list[str]:
    """Insert all rows, and return their ids. Refuses what `enqueue` refuses."""
    sql = call_of(schema, "enqueue", 6)
    ids: list[str] = []

    def parameters_of(number: int) -> tuple[Any, ...] | None:
        part = batch.part(number)
        if not part:
            return None
        changes, part_ids = insertion(part)
        ids.extend(part_ids)
        # Notifies in any case: a storage may begin to wait before this is committed.
        return enqueue_parameters(now, changes, is_certain=True)

    async def build(number: int) -> tuple[Any, ...] | None:
        # Lets the insert of the part before be sent first.
        await clock.sleep(0)
        return parameters_of(number)

    async with db.transaction():
        number, parameters = 0, parameters_of(0)
        while parameters is not None:
            number += 1
            # Both are awaited even if one fails: a connection can run one statement at a time.
            done, parameters = await asyncio.gather(
                db.fetch(sql, *parameters), build(number), return_exceptions=True
            )
            for outcome in (done, parameters):
                if isinstance(outcome, BaseException):
                    raise outcome
    return ids
