"""An optimistic section on the tables of the host: its write fails if a record that it has read was changed."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

from omniq.storage.backend import (
    Changes,
    Document,
    DocumentQuery,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.nats import calls
from omniq.storage.nats.calls import Call, ReadRecord
from omniq.storage.pauses import PAUSED_QUEUE
from omniq.storage.row_rules import Row
from omniq.storage.tables import TablesSection
from omniq.storage.types import Claim, Holder


class Perform(Protocol):
    """Has the host run a call."""

    def __call__(self, call: Call) -> Awaitable[Any]:
        """The value that the host returns."""
        ...


class HostSection(TablesSection):
    """A section of the host itself. It stores which rows are claimed, in case the call is repeated."""

    async def write(self, changes: Changes) -> frozenset[str]:
        taken = await super().write(changes)
        calls.note_claim(self._tables, self.claim_id, changes.claimed)
        return taken


class RemoteSection(Section):
    """A section whose reads and write are calls. `holder` is the owner that claims in it, if one does."""

    def __init__(self, perform: Perform, now: int, holder: Holder | None) -> None:
        self.now = now
        self._perform = perform
        self._holder = holder
        # The first version that was read of each record: changes are based on it.
        self._digests: dict[str, bytes] = {}
        self._paused: list[str] | None = None

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        if self._holder is not None:
            self.epoch = await self._perform(calls.Begin(holder=self._holder))
        return frozenset()

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if not ids:
            return {}
        found = await self._perform(calls.Load(ids=list(ids)))
        for task_id in ids:
            # A record that was missing must still be missing at the write.
            self._digests.setdefault(task_id, b"")
        return {read.record.row.id: read.record for read in self._noted(found)}

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        if not owners:
            return []
        return await self._rows(calls.Held(owners=list(owners), only_suspects=only_suspects))

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        return await self._rows(calls.Candidates(wanted=wanted, after=after, limit=limit))

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        return await self._rows(calls.Parked(keys=list(keys), limit=limit))

    async def _rows(self, call: Call) -> list[Row]:
        return [read.record.row for read in self._noted(await self._perform(call))]

    def _noted(self, found: list[ReadRecord]) -> list[ReadRecord]:
        for read in found:
            task_id = read.record.row.id
            if not self._digests.get(task_id):
                self._digests[task_id] = read.digest
        return found

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if not wanted:
            return {}
        found: dict[str, Document] = await self._perform(calls.Documents(kind=kind, keys=wanted))
        return found

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        found: list[Document] = await self._perform(calls.FindDocuments(query=query))
        if query.kind == PAUSED_QUEUE:
            self._paused = [document.key for document in found]
        return found

    async def write(self, changes: Changes) -> frozenset[str]:
        taken: frozenset[str] = await self._perform(self._call(changes))
        return taken

    def _call(self, changes: Changes) -> calls.Write:
        return write_call(
            changes,
            holder=self._holder,
            claim_id=self.claim_id,
            paused=self._paused if changes.claimed else None,
            digests=self._digests,
        )


def write_call(
    changes: Changes,
    *,
    holder: Holder | None = None,
    claim_id: str = "",
    paused: list[str] | None = None,
    digests: dict[str, bytes] | None = None,
) -> calls.Write:
    """The changes as a call."""
    return calls.Write(
        holder=holder,
        claim_id=claim_id,
        paused=paused,
        digests=digests or {},
        inserted=list(changes.inserted),
        bound=changes.bound,
        claimed=changes.claimed,
        updated=changes.updated,
        rewritten=list(changes.rewritten),
        ended=[calls.SentEnd(each.finished, each.letter) for each in changes.ended],
        checked=[row.id for row in changes.checked],
        documents=list(map(calls.SentDocument.of, changes.documents)),
        deleted_finished=list(changes.deleted_finished),
        finished_before=changes.finished_before,
        deleted_dead=list(changes.deleted_dead),
    )
