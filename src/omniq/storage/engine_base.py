"""What all steps of the engine share: sections that are repeated, documents, and what is stored of a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from omniq.errors import StorageError
from omniq.models import QueueStats
from omniq.serialization import Serializer
from omniq.storage.backend import (
    ANY,
    Backend,
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    Moved,
    Record,
    Section,
)
from omniq.storage.row_rules import Row
from omniq.storage.row_seals import row_seals
from omniq.storage.step import NEWEST
from omniq.storage.types import Identity

_TRIES = 1_000
"""How often a step is begun. Each failure means that another step has made progress."""

_TRIES_WITHIN = 10
"""How often a step is begun in a caller's transaction, which may not see what others have committed."""

NOWHERE = object()
"""No connection of a caller; None may be given as one by mistake."""

_T = TypeVar("_T")
_P = ParamSpec("_P")
_E = TypeVar("_E", bound="EngineBase")


def atomic(
    step: Callable[Concatenate[_E, Section, _P], Awaitable[_T]],
) -> Callable[Concatenate[_E, _P], Awaitable[_T]]:
    """Make a method that takes a section one atomic step: callers call it without the section."""

    @wraps(step)
    async def run(self: _E, /, *args: _P.args, **options: _P.kwargs) -> _T:
        return await self._transact(lambda section: step(self, section, *args, **options))

    return run


class EngineBase:
    """Runs steps over one backend."""

    def __init__(
        self,
        backend: Backend,
        serializer: Serializer,
        max_pending: int | None,
        identity: Identity,
    ) -> None:
        self.backend = backend
        backend.identity = identity
        # Nothing of these depends on a rule.
        self.page, self.pause_worker = backend.page, backend.pause_worker
        self._identity = identity
        self._serializer = serializer
        self._seals = row_seals(serializer)
        self._max_pending = max_pending

    async def _transact(
        self,
        work: Callable[[Section], Awaitable[_T]],
        *,
        claims_as: str | None = None,
        within: object = NOWHERE,
    ) -> _T:
        """Run `work` in a section; with `within`, in a caller's transaction on that connection."""
        if within is not NOWHERE:
            return await self._transact_within(within, work)
        for _ in range(_TRIES):
            with suppress(Moved):
                return await self.backend.transact(work, claims_as=claims_as)
        raise StorageError(
            f"gave up: what this call reads was changed {_TRIES:,} times before it could write; a stored "
            "record may be damaged: run omniq doctor"
        )

    async def _transact_within(
        self, connection: object, work: Callable[[Section], Awaitable[_T]]
    ) -> _T:
        for _ in range(_TRIES_WITHIN):
            with suppress(Moved):
                return await self.backend.transact_within(connection, work)
        raise StorageError(
            "enqueue on the given connection: its transaction does not see the task that has the same id or "
            "unique key, since it began before that task was committed; roll it back, and begin it again"
        )

    async def _read(self, work: Callable[[Section], Awaitable[_T]]) -> _T:
        return await self.backend.transact(work, writes=False)

    @atomic
    async def _write(self, section: Section, changes: Changes) -> None:
        """Write changes that depend on nothing that is stored."""
        await section.write(changes)

    async def _document(self, kind: str, key: str) -> Document | None:
        return await self._read(lambda section: section.document(kind, key))

    async def _all_documents(self, kind: str) -> list[Document]:
        found: list[Document] = []
        query = DocumentQuery(kind=kind)
        while True:
            page = await self._read(lambda section, query=query: section.find_documents(query))  # type: ignore[misc]
            found += page
            if len(page) < query.limit:
                return found
            query = msgspec.structs.replace(query, after=page[-1].key)

    @atomic
    async def _put_dated(self, section: Section, make: Callable[[int], DocumentChange]) -> None:
        await section.write(Changes(documents=[make(section.now)]))

    # Reading

    async def record(self, task_id: str) -> Record | None:
        """What is stored under the id, with its body."""
        return await self._read(lambda section: section.record(task_id, bodies=True))

    async def newest_result(self, task_id: str) -> bytes | None:
        """The encoded result of a repeating task's newest run."""
        document = await self._document(NEWEST, task_id)
        return None if document is None else document.data

    async def stats(self) -> QueueStats:
        """The number of tasks by status and by queue, and the number of dead letters."""
        counts = await self.backend.counts()
        ages = {queue: (counts.now - due) / 1_000_000 for queue, due in counts.oldest.items()}
        due = {queue: age for queue, age in ages.items() if age >= 0}
        return QueueStats(
            by_status=counts.by_status,
            by_queue=counts.by_queue,
            oldest_due_age=max(due.values(), default=0.0),
            dead=counts.dead,
            oldest_by_queue=due,
        )

    async def count_waiting(self) -> int:
        """The number of live tasks that do not run."""
        return (await self.backend.counts(only_waiting=True)).waiting


async def current_rows(section: Section, owner: str, tokens: dict[str, int]) -> dict[str, Row]:
    """The rows that the owner holds by these tokens."""
    found = await section.load(list(tokens))
    return {
        task_id: record.row
        for task_id, record in found.items()
        if record.is_live and (record.row.owner, record.row.token) == (owner, tokens[task_id])
    }


def attach(changes: Changes, row: Row) -> None:
    """Mark a row that it may have documents; one that is marked must not have changed."""
    if row.attached:
        changes.checked.append(row)
    else:
        row.attached = True
        changes.updated.append(row)


def known_data(document: Document) -> bytes:
    """What a change of the document compares; one that is too large was not read, and is not compared."""
    data: bytes = document.data or ANY
    return data
