"""The calls that processes send to the host, as values. The host runs them on its tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any, ClassVar, Union

import msgspec

from omniq.errors import LeaseLost
from omniq.models import StoredLetter, WorkerInfo
from omniq.serialization import encode_internal, internal_decoder, lenient_decoder
from omniq.storage import row_rules
from omniq.storage.backend import (
    ANY,
    Changes,
    Counts,
    Document,
    DocumentChange,
    DocumentQuery,
    Ended,
    FastReply,
    FinishedQuery,
    Lease,
    Moved,
    Order,
    Record,
    Wanted,
    complete,
)
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.pauses import PAUSED_QUEUE, without_paused
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.tables import Tables, TablesSection
from omniq.storage.types import Claim, Holder, LeaseReply


class ReadRecord(msgspec.Struct, array_like=True, gc=False):
    """A record as it was read, and a digest by which a write detects that it has changed."""

    digest: bytes
    record: Record


class Call(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A call of the port. A repeated call has the same id."""

    id: str = ""
    writes: ClassVar[bool] = False
    replies: ClassVar[Any]

    @abstractmethod
    def run(self, tables: Tables, now: int) -> Any:
        """Read and change the tables; may be run again on a newer state."""


# Sections: reads, and a write that compares what was read


class Begin(Call):
    """Check the lease of an owner that is about to claim; returns the epoch."""

    holder: Holder
    replies = int

    def run(self, tables: Tables, now: int) -> int:
        _check_lease(tables, self.holder)
        return tables.epoch


class Load(Call):
    """`Section.load`."""

    ids: list[str]
    replies = list[ReadRecord]

    def run(self, tables: Tables, now: int) -> list[ReadRecord]:
        return _read(tables, now, self.ids)


class Held(Call):
    """`Section.held`."""

    owners: list[str]
    only_suspects: bool
    replies = list[ReadRecord]

    def run(self, tables: Tables, now: int) -> list[ReadRecord]:
        section = TablesSection(tables, now)
        rows = complete(section.held(self.owners, only_suspects=self.only_suspects))
        return _read(tables, now, [row.id for row in rows])


class Candidates(Call):
    """`Section.candidates`."""

    wanted: Wanted
    after: Order | None
    limit: int
    replies = list[ReadRecord]

    def run(self, tables: Tables, now: int) -> list[ReadRecord]:
        section = TablesSection(tables, now)
        rows = complete(section.candidates(self.wanted, self.after, self.limit))
        return _read(tables, now, [row.id for row in rows])


class Parked(Call):
    """`Section.parked`."""

    keys: list[str]
    limit: int
    replies = list[ReadRecord]

    def run(self, tables: Tables, now: int) -> list[ReadRecord]:
        rows = complete(TablesSection(tables, now).parked(self.keys, self.limit))
        return _read(tables, now, [row.id for row in rows])


class Documents(Call):
    """`Section.documents`."""

    kind: str
    keys: list[str]
    replies = dict[str, Document]

    def run(self, tables: Tables, now: int) -> dict[str, Document]:
        return complete(TablesSection(tables, now).documents(self.kind, self.keys))


class FindDocuments(Call):
    """`Section.find_documents`."""

    query: DocumentQuery
    replies = list[Document]

    def run(self, tables: Tables, now: int) -> list[Document]:
        return tables.documents[self.query.kind].find(self.query)


class SentDocument(msgspec.Struct, array_like=True, gc=False):
    """A `DocumentChange`; `before` is True for `ANY`."""

    kind: str
    key: str
    before: bytes | bool | None
    after: bytes | None
    due: int | None
    if_equal: bool

    @classmethod
    def of(cls, change: DocumentChange) -> SentDocument:
        """The change in the form in which it is sent."""
        before = True if change.before is ANY else change.before
        return cls(change.kind, change.key, before, change.after, change.due, change.if_equal)

    def change(self) -> DocumentChange:
        """The change that was sent."""
        before = ANY if isinstance(self.before, bool) else self.before
        return DocumentChange(self.kind, self.key, before, self.after, self.due, self.if_equal)


CLAIM = "claim"
"""The kind of the documents with the last claim of each owner; the key is the owner."""


class LastClaim(msgspec.Struct, array_like=True, frozen=True):
    """The last claim of an owner that has an id, in case the reply is lost and the call is repeated."""

    id: str
    tokens: dict[str, int]


_decode_claim = lenient_decoder(LastClaim, None)


def note_claim(tables: Tables, claim_id: str, rows: list[Row]) -> None:
    """Store which rows their owner has claimed, if the claim has an id."""
    if claim_id and rows:
        owner = rows[0].owner or ""
        data = encode_internal(LastClaim(claim_id, {row.id: row.token for row in rows}))
        tables.set_document(CLAIM, owner, Document(CLAIM, owner, data))


class SentEnd(msgspec.Struct, array_like=True, gc=False):
    """An `Ended`."""

    finished: FinishedRow
    letter: StoredLetter | None = None


class Write(Call):
    """`Section.write`: makes the changes if the rows have not changed since they were read.

    `holder` is the owner that claims; `paused` are the queues that were paused when it chose the rows.
    `digests` are those of the records that were read. Rows without gates that another owner has claimed
    first are left out, and returned.
    """

    holder: Holder | None
    claim_id: str
    paused: list[str] | None
    digests: dict[str, bytes]
    inserted: list[Row]
    bound: int | None
    claimed: list[Row]
    updated: list[Row]
    rewritten: list[str]
    ended: list[SentEnd]
    checked: list[str]
    documents: list[SentDocument]
    deleted_finished: list[str]
    finished_before: int | None
    deleted_dead: list[str]
    writes = True
    replies = frozenset[str]

    def run(self, tables: Tables, now: int) -> frozenset[str]:
        if self.holder is not None:
            _check_lease(tables, self.holder)
        if self.paused is not None and sorted(self.paused) != sorted(
            tables.documents[PAUSED_QUEUE].by_key
        ):
            raise Moved
        taken = frozenset(row.id for row in self.claimed if self._has_moved(tables, now, row.id))
        if any(row.id in taken and row.gates for row in self.claimed):
            raise Moved
        ended = [Ended(each.finished, each.letter) for each in self.ended]
        touched = [*(row.id for row in self.updated), *(each.row.id for each in ended)]
        for task_id in (*touched, *self.checked, *self.deleted_dead):
            if self._has_moved(tables, now, task_id):
                raise Moved
        for each in ended:
            _fill_body(each.row, tables)
        changes = Changes(
            inserted=self.inserted,
            bound=self.bound,
            claimed=[row for row in self.claimed if row.id not in taken],
            updated=self.updated,
            rewritten=self.rewritten,
            ended=ended,
            documents=[document.change() for document in self.documents],
            deleted_finished=self.deleted_finished,
            finished_before=self.finished_before,
            deleted_dead=self.deleted_dead,
        )
        tables.write(changes, now)
        note_claim(tables, self.claim_id, changes.claimed)
        return taken

    def _has_moved(self, tables: Tables, now: int, task_id: str) -> bool:
        digest = self.digests.get(task_id)
        return digest is not None and digest != _digest(tables.record_of(task_id, now))


# The fast path


class RecordAndClaim(Call):
    """`FastPath.record_and_claim`: rows that this owner still has, and plain rows in claim order."""

    holder: Holder
    ended: list[FinishedRow]
    updated: list[Row]
    documents: list[SentDocument]
    claim: Claim | None
    writes = True
    replies = FastReply

    def run(self, tables: Tables, now: int) -> FastReply:
        if self.claim is not None:
            _check_lease(tables, self.holder)
        missed = self._record(tables, now)
        claim = self.claim
        repeated = [] if claim is None else self._repeated(tables, claim.claim_id)
        if missed or repeated or claim is None:
            return FastReply(missed, repeated or None)
        if claim.witness is not None:
            row = tables.rows.get(claim.witness.id)
            if row is not None and row.token < claim.witness.token:
                return FastReply(is_behind=True)
        due = tables.documents[GATE].next_due()
        if due is not None and due <= now:
            return FastReply()
        return self._claim(tables, now, claim)

    def _repeated(self, tables: Tables, claim_id: str) -> list[Row]:
        """The rows that this owner has claimed by an earlier call with the same id, and still has."""
        owner = self.holder.owner
        document = tables.document(CLAIM, owner) if claim_id else None
        last = None if document is None else _decode_claim(document.data)
        if last is None or last.id != claim_id:
            return []
        held = tables.held.get(owner, {})
        return [
            row_rules.copy_of(row) for row in held.values() if last.tokens.get(row.id) == row.token
        ]

    def _record(self, tables: Tables, now: int) -> frozenset[str]:
        """Write the outcomes; returns the ids of the tasks whose rows have changed."""
        owner, missed = self.holder.owner, set()
        changes = Changes(ended=[], updated=[], documents=[])
        for finished in self.ended:
            row = finished.row
            if _is_as_claimed(tables.rows.get(row.id), row, owner):
                _fill_body(row, tables)
                changes.ended.append(Ended(finished))
            else:
                missed.add(row.id)
        for row in self.updated:
            if _is_as_claimed(tables.rows.get(row.id), row, owner):
                changes.updated.append(row)
            else:
                missed.add(row.id)
        for document in self.documents:
            if isinstance(document.before, bytes) and document.before.decode() not in missed:
                changes.documents.append(document.change())
        if not changes.is_empty:
            tables.write(changes, now)
        return frozenset(missed)

    def _claim(self, tables: Tables, now: int, claim: Claim) -> FastReply:
        owner, held = self.holder.owner, tables.held.get(self.holder.owner, {})
        paused = frozenset(tables.documents[PAUSED_QUEUE].by_key)
        wanted = Wanted(
            due_by=now if claim.now is None else claim.now,
            queues=claim.queues,
            paused=paused,
            runnable=without_paused(claim.runnable, paused),
            suspects=not any(row.crashes for row in held.values()),
        )
        tables.ready.promote(wanted.due_by)
        found = tables.ready.candidates(wanted, None, claim.limit)
        rows: list[Row] = []
        for row in found:
            is_gated = row.gates or row.crashes or row.parked or row.expires is not None
            if is_gated or row_rules.needs_place(row):
                # The rules decide about this row and all later ones.
                break
            row = row_rules.copy_of(row)
            row_rules.claim(row, owner, now, tables.epoch)
            rows.append(row)
        if rows:
            tables.write(Changes(claimed=rows), now)
            note_claim(tables, claim.claim_id, rows)
        return FastReply(rows=rows, is_partial=len(rows) < len(found))


# Pages, counts, leases


class Page(Call):
    """`Backend.page`."""

    kind: str
    query: msgspec.Raw
    replies = msgspec.Raw

    def run(self, tables: Tables, now: int) -> msgspec.Raw:
        query = page_query(self.kind)(bytes(self.query))
        return msgspec.Raw(encode_internal(tables.page(query, now)))


PAGES: dict[str, tuple[Any, Any]] = {
    "TaskQuery": (TaskQuery, list[Row]),
    "ScanQuery": (ScanQuery, Scan),
    "DeadQuery": (DeadQuery, list[StoredLetter]),
    "FinishedQuery": (FinishedQuery, list[str]),
}
"""The kinds of queries, and what each returns."""


@cache
def page_query(kind: str) -> Any:
    """A decoder of queries of that kind."""
    return internal_decoder(PAGES[kind][0])


@cache
def page_reply(kind: str) -> Any:
    """A decoder of the pages for queries of that kind."""
    return internal_decoder(PAGES[kind][1])


class Count(Call):
    """`Backend.counts`."""

    only_waiting: bool
    replies = Counts

    def run(self, tables: Tables, now: int) -> Counts:
        if self.only_waiting:
            return Counts(now=now, waiting=tables.count_waiting())
        return tables.counts(now)


class Leases(Call):
    """`Backend.leases`."""

    replies = list[Lease]

    def run(self, tables: Tables, now: int) -> list[Lease]:
        return tables.list_leases(now)


class Renew(Call):
    """`Backend.renew`."""

    info: WorkerInfo
    length: int
    holder: Holder
    writes = True
    replies = LeaseReply

    def run(self, tables: Tables, now: int) -> LeaseReply:
        return tables.renew(self.info, now + self.length, self.holder)


class Fence(Call):
    """`Backend.fence`."""

    owner: str
    retires: bool
    writes = True
    replies = bool

    def run(self, tables: Tables, now: int) -> bool:
        is_fenced = tables.fence(self.owner, now, retires=self.retires)
        if is_fenced and tables.document(CLAIM, self.owner) is not None:
            tables.set_document(CLAIM, self.owner, None)
        return is_fenced


class PauseWorker(Call):
    """`Backend.pause_worker`."""

    owner: str
    paused: bool
    writes = True
    replies = bool

    def run(self, tables: Tables, now: int) -> bool:
        return tables.pause_worker(self.owner, now, paused=self.paused)


def _check_lease(tables: Tables, holder: Holder) -> None:
    if not tables.has_lease(holder):
        raise LeaseLost(holder.owner)


def _is_as_claimed(stored: Row | None, row: Row, owner: str) -> bool:
    return (
        stored is not None
        and stored.owner == owner
        and stored.token == row.token
        and not stored.cancel_requested
        and not stored.attached
    )


def _fill_body(row: Row, tables: Tables) -> None:
    """Give an ended row that was sent without its body the stored one."""
    stored: Mapping[str, Row] = tables.rows
    if not row.body and row.id in stored:
        row.body = stored[row.id].body


def _read(tables: Tables, now: int, ids: list[str]) -> list[ReadRecord]:
    # Copies: the host encodes nothing for itself, and the engine changes the rows that it has read.
    return [
        ReadRecord(
            _digest(record),
            Record(row_rules.copy_of(record.row), record.finished, record.letter),
        )
        for task_id in ids
        if (record := tables.record_of(task_id, now)) is not None
    ]


def _digest(record: Record | None) -> bytes:
    return b"" if record is None else blake2b(encode_internal(record), digest_size=8).digest()


AnyCall = Union[tuple(Call.__subclasses__())]  # type: ignore[valid-type]  # noqa: UP007 -- of a list
decode_call: Callable[[bytes], Call] = internal_decoder(AnyCall)  # type: ignore[arg-type]


@cache
def value_decoder(kind: type[Call]) -> Any:
    """A decoder of the values that the host returns for calls of that kind."""
    return internal_decoder(kind.replies)
