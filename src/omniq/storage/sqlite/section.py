"""Section: the reads and writes of one atomic step, inside a transaction of one connection.

The transaction has the write lock from its beginning, so nothing that the section reads can change
before it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from omniq.errors import LeaseLost, QueueFull
from omniq.storage import row_rules
from omniq.storage.backend import (
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    Moved,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.pauses import PAUSED_QUEUE
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import StatementRunner, statement
from omniq.storage.sqlite.lanes import first_rows
from omniq.storage.types import Claim, Holder

PROMOTE_BATCH = 2_000
"""The maximum number of delayed tasks that one statement makes ready."""

_order = attrgetter("order")

_DOCUMENT_COLUMNS = ("kind", "key", "data", "due")
_ADD_DOCUMENTS = tables.BulkInsert(
    "omniq_documents", _DOCUMENT_COLUMNS, "ON CONFLICT (kind, key) DO NOTHING"
)
_PUT_DOCUMENTS = tables.BulkInsert(
    "omniq_documents",
    _DOCUMENT_COLUMNS,
    "ON CONFLICT (kind, key) DO UPDATE SET data = excluded.data, due = excluded.due",
)


class _ClaimFacts(NamedTuple):
    """What a claim has to consider besides ready tasks: see `claim_facts.sql`."""

    is_fenced: int
    epoch: int
    has_due: int
    has_due_gate: int
    holds_suspect: int
    paused: str

    def queues(self) -> list[str]:
        """The paused queues."""
        names: list[str] = tables.decode_json(self.paused)
        return names


class SQLiteSection(Section):
    """A section on a connection whose transaction has begun."""

    def __init__(self, db: StatementRunner, now: int) -> None:
        self.now = now
        self._db = db
        self._promoted_by = now
        self._facts: _ClaimFacts | None = None
        self.wanted: Wanted | None = None
        """What was claimed in this section."""
        self.may_have_more = False
        """Whether there may be more rows of that kind."""

    # Reading

    def begin_claim(self, holder: Holder) -> bool:
        """Begin a section that claims; False when not all tasks that are due could be made ready.

        `LeaseLost` if the owner is fenced, or knows another epoch than the store's.
        """
        parameters = {"owner": holder.owner, "now": self.now}
        facts = _ClaimFacts(*self._db.execute(statement("claim_facts"), parameters).fetchone())
        if facts.is_fenced or facts.epoch != holder.epoch:
            raise LeaseLost(holder.owner)
        self._facts, self.epoch = facts, facts.epoch
        return not (facts.has_due and self.promote(self.now))

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        if not known:
            return frozenset()
        parameters = {"owner": owner, "seqs": tables.json_text([row.seq for row in known])}
        (text,) = self._db.execute(statement("still_held"), parameters).fetchone()
        tokens = tables.decode_json(text)
        return frozenset([row.id for row in known if tokens.get(row.id) == row.token])

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        return tables.read_records(self._db, ids, self.now, bodies=bodies)

    async def live_token(self, task_id: str) -> int | None:
        found = self._db.execute(statement("live_token"), (task_id,)).fetchone()
        return None if found is None else int(found[0])

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        sql = tables.rows_statement("held", bodies=False)
        if only_suspects:
            if self._facts is not None and not self._facts.holds_suspect:
                return []
            sql += " WHERE live.crashes > 0"
        return tables.read_rows(self._db, sql, {"owners": tables.json_text(owners)})

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        if wanted.due_by > self._promoted_by:
            # A caller may name a time to come. What is due by now was made ready before.
            self._promoted_by = wanted.due_by
            while self.promote(wanted.due_by):
                pass
        rows = first_rows(self._db, wanted, after, limit)
        if not wanted.only_looks:
            self.wanted, self.may_have_more = wanted, len(rows) == limit
        return rows

    def promote(self, due_by: int) -> bool:
        """Make delayed tasks ready that have become visible; returns whether there may be more."""
        parameters = {"due_by": due_by, "limit": PROMOTE_BATCH}
        return self._db.execute(statement("promote"), parameters).rowcount == PROMOTE_BATCH

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        parameters = {"keys": tables.json_text(keys), "limit": limit}
        rows = tables.read_rows(self._db, tables.rows_statement("parked"), parameters)
        return rows if limit == 1 else sorted(rows, key=_order)

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        parameters = {"kind": kind, "keys": tables.json_text(list(keys))}
        return {each.key: each for each in self._read_documents("documents", parameters)}

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        facts = self._facts
        if facts is not None and query.kind == PAUSED_QUEUE:
            return [Document(PAUSED_QUEUE, queue, b"") for queue in facts.queues()]
        is_for_due_gates = query.kind == GATE and query.due_by == self.now
        if facts is not None and is_for_due_gates and not facts.has_due_gate:
            return []
        name = "find_documents" if query.due_by is None else "due_documents"
        return self._read_documents(name, msgspec.structs.asdict(query))

    def _read_documents(self, name: str, parameters: dict[str, Any]) -> list[Document]:
        found = tables.read_array(self._db, tables.rows_statement(name), parameters)
        long_data = "SELECT hex(data) FROM omniq_documents WHERE kind = ? AND key = ?"
        return [
            Document(kind, key, tables.blob(self._db, data, long_data, kind, key), due)
            for kind, key, data, due in found
        ]

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        db = self._db
        if changes.deleted_finished:
            condition, before = "true", changes.finished_before
            if before is not None:
                condition = "finished_at < :before"
            ids = changes.deleted_finished
            tables.delete_records(db, "omniq_finished", ids, condition, before=before)
        if changes.deleted_dead:
            tables.delete_records(db, "omniq_dead", changes.deleted_dead)
        if changes.inserted:
            self._insert(changes.inserted)
        if changes.documents:
            self._write_documents(changes.documents)
        if changes.inserted and changes.bound is not None:
            self._check_bound(changes.bound)
        if changes.claimed:
            self._claim(changes.claimed)
        if changes.updated:
            self._update(changes)
        if changes.ended:
            tables.insert_ended(db, changes.ended)
        return frozenset()

    def _claim(self, rows: Sequence[Row]) -> None:
        """Store rows that one owner has claimed."""
        seqs = tables.json_text([row.seq for row in rows])
        floor = row_rules.first_token(self.epoch)
        parameters = {"owner": rows[0].owner, "now": self.now, "seqs": seqs, "floor": floor}
        self._db.execute(statement("claim"), parameters)

    def _update(self, changes: Changes) -> None:
        moved: dict[str, list[int]] = {}
        others: list[Row] = []
        for row in changes.updated:
            if row.id in changes.moved:
                moved.setdefault(row.parked or "", []).append(row.seq)
            else:
                others.append(row)
        if moved:
            self._db.execute(statement("move"), {"moved": tables.json_text(moved)})
        if changes.rewritten:
            tables.rewrite(self._db, [row for row in others if row.id in changes.rewritten])
        tables.save_live(self._db, others, self.now)

    def _insert(self, rows: Sequence[Row]) -> None:
        if tables.insert_rows(self._db, rows, self.now):
            return
        # An expired record does not occupy its id.
        ids = [row.id for row in rows]
        expired = "expires_at <= :now"
        tables.delete_records(self._db, "omniq_finished", ids, expired, now=self.now)
        if not tables.insert_rows(self._db, rows, self.now):
            raise Moved

    def _check_bound(self, bound: int) -> None:
        (waiting,) = self._db.execute(
            "SELECT (SELECT count(*) FROM omniq_live) - "
            "(SELECT count(*) FROM omniq_live WHERE place = 4)"
        ).fetchone()
        if waiting > bound:
            raise QueueFull(bound)

    def _write_documents(self, changes: Iterable[DocumentChange]) -> None:
        added: list[tuple[Any, ...]] = []
        put: dict[tuple[str, str], tuple[Any, ...]] = {}
        deleted: dict[tuple[str, str], None] = {}
        released: list[tuple[str, str, str]] = []
        for change in changes:
            key = (change.kind, change.key)
            if change.if_equal:
                released.append((*key, (change.before or b"").hex().upper()))
            elif change.after is None:
                put.pop(key, None)
                deleted[key] = None
            elif change.before is None:
                added.append((*key, bytearray(change.after), change.due))
            else:
                deleted.pop(key, None)
                put[key] = (*key, bytearray(change.after), change.due)
        if released:
            self._db.execute(statement("delete_if_equal"), {"keys": tables.json_text(released)})
        if deleted:
            self._db.execute(
                statement("delete_documents"), {"keys": tables.json_text(list(deleted))}
            )
        if _ADD_DOCUMENTS.write(self._db, added) < len(added):
            raise Moved
        _PUT_DOCUMENTS.write(self._db, list(put.values()))
