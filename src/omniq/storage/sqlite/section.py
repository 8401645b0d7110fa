"""Section: the reads and writes of one atomic step, inside a transaction of one connection.

The transaction has the write lock from its beginning, so nothing that the section reads can change
before it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from omniq.errors import LeaseLost, QueueFull
from omniq.storage import row_rules
from omniq.storage.backend import (
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    FastReply,
    Moved,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import StatementRunner, statement
from omniq.storage.sqlite.lanes import AFTER_ALL, first_rows
from omniq.storage.types import Claim, Holder, Witness

PROMOTE_BATCH = 2_000
"""The maximum number of delayed tasks that one statement makes ready."""

_order = attrgetter("order")
_NO_WITNESS = Witness("", 0, "", 0)

_DOCUMENT_COLUMNS = ("kind", "key", "data", "due")
_ADD_DOCUMENTS = tables.BulkInsert(
    "omniq_documents", _DOCUMENT_COLUMNS, "ON CONFLICT (kind, key) DO NOTHING"
)
_PUT_DOCUMENTS = tables.BulkInsert(
    "omniq_documents",
    _DOCUMENT_COLUMNS,
    "ON CONFLICT (kind, key) DO UPDATE SET data = excluded.data, due = excluded.due",
)


DELETE_DOCUMENTS = (
    "DELETE FROM omniq_documents WHERE (kind, key) IN "
    "(SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(:keys))"
)


DELETE_IF_EQUAL = (
    f"{DELETE_DOCUMENTS} AND kind || '/' || key || '/' || hex(data) IN "
    "(SELECT json_extract(value, '$[2]') FROM json_each(:keys))"
)


class SQLiteSection(Section):
    """A section on a connection whose transaction has begun."""

    def __init__(self, db: StatementRunner, now: int) -> None:
        self.now = now
        self._db = db
        self._promoted_by = now
        self.is_behind = False
        """Whether the witness of the claim has a lower token."""
        self.wanted: Wanted | None = None
        """What was claimed in this section."""

    # Reading

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        held = self._still_held(owner, known)
        return frozenset(row.id for row in known if row.seq in held)

    def _still_held(self, owner: str, rows: Sequence[Row]) -> set[int]:
        """The `seq` of those rows that nothing has changed since the owner claimed them."""
        if not rows:
            return set()
        claims = tables.json_text([(row.seq, row.token, row.id) for row in rows])
        parameters = {"owner": owner, "claims": claims}
        return set(tables.read_array(self._db, statement("still_held"), parameters))

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        return tables.read_records(self._db, ids, self.now, bodies=bodies)

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        sql = tables.rows_statement("held", bodies=False)
        if only_suspects:
            sql += " WHERE live.crashes > 0"
        return tables.read_rows(self._db, sql, {"owners": tables.json_text(owners)})

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        if wanted.due_by > self._promoted_by:
            # A caller may name a time to come. What is due by now was made ready before.
            self._promoted_by = wanted.due_by
            while self.promote(wanted.due_by):
                pass
        self.wanted = wanted
        return first_rows(self._db, wanted, after, limit)

    def promote(self, due_by: int) -> bool:
        """Make delayed tasks ready that have become visible; returns whether there may be more."""
        parameters = {"due_by": due_by, "limit": PROMOTE_BATCH}
        return self._db.execute(statement("promote"), parameters).rowcount == PROMOTE_BATCH

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        parameters = {"keys": tables.json_text(keys), "limit": limit}
        rows = tables.read_rows(self._db, tables.rows_statement("parked"), parameters)
        return sorted(rows, key=_order)

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        parameters = {"kind": kind, "keys": tables.json_text(list(keys))}
        found = self._read_documents(
            "FROM json_each(:keys) AS wanted CROSS JOIN omniq_documents AS found "
            "ON found.kind = :kind AND found.key = wanted.value",
            parameters,
        )
        return {document.key: document for document in found}

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        first = query.prefix
        if query.due_by is not None:
            condition = "due > :due_after AND due <= :due_by ORDER BY due"
        elif query.after >= query.prefix:
            first, condition = query.after, "key > :first AND key < :end ORDER BY key"
        else:
            condition = "key >= :first AND key < :end ORDER BY key"
        return self._read_documents(
            "FROM (SELECT * FROM omniq_documents "
            f"WHERE kind = :kind AND {condition} LIMIT :limit) AS found",
            {
                "kind": query.kind,
                "due_by": query.due_by,
                "due_after": query.due_after,
                "first": first,
                "end": query.prefix + AFTER_ALL,
                "limit": query.limit,
            },
        )

    def _read_documents(self, source: str, parameters: dict[str, Any]) -> list[Document]:
        columns = f"found.kind, found.key, {tables.inline_hex('found.data')}, found.due"
        sql = f"SELECT json_group_array(json_array({columns})) {source}"
        return [
            Document(kind, key, self._data(kind, key, data), due)
            for kind, key, data, due in tables.read_array(self._db, sql, parameters)
        ]

    def _data(self, kind: str, key: str, inline: str | None) -> bytes:
        if inline is not None:
            return bytes.fromhex(inline)
        sql = "SELECT data FROM omniq_documents WHERE kind = ? AND key = ?"
        data: bytes = self._db.execute(sql, (kind, key)).fetchone()[0]
        return data

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
            tables.save_live(db, changes.updated, self.now)
        if changes.ended:
            tables.insert_ended(db, changes.ended)
        return frozenset()

    def _claim(self, rows: Sequence[Row]) -> None:
        """Store rows that one owner has claimed."""
        seqs = tables.json_text([row.seq for row in rows])
        floor = row_rules.first_token(self.epoch)
        parameters = {"owner": rows[0].owner, "now": self.now, "seqs": seqs, "floor": floor}
        self._db.execute(statement("claim"), parameters)

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
                released.append((*key, f"{change.kind}/{change.key}/{_hex(change.before)}"))
            elif change.after is None:
                put.pop(key, None)
                deleted[key] = None
            elif change.before is None:
                added.append((*key, bytearray(change.after), change.due))
            else:
                deleted.pop(key, None)
                put[key] = (*key, bytearray(change.after), change.due)
        if released:
            self._db.execute(DELETE_IF_EQUAL, {"keys": tables.json_text(released)})
        if deleted:
            self._db.execute(DELETE_DOCUMENTS, {"keys": tables.json_text(list(deleted))})
        if _ADD_DOCUMENTS.write(self._db, added) < len(added):
            raise Moved
        _PUT_DOCUMENTS.write(self._db, list(put.values()))

    # The fast path

    async def record_and_claim(
        self, holder: Holder, changes: Changes, claim: Claim | None
    ) -> FastReply:
        """See `FastPath`. When one row has changed, all outcomes need another step, so none is recorded."""
        rows = [*(each.row for each in changes.ended), *changes.updated]
        if len(self._still_held(holder.owner, rows)) < len(rows):
            return FastReply(frozenset(row.id for row in rows))
        await self.write(changes)
        if claim is None:
            return FastReply()
        claimed = await self._claim_plain(holder, claim)
        return FastReply(rows=claimed, is_behind=bool(self.is_behind))

    async def _claim_plain(self, holder: Holder, claim: Claim) -> list[Row] | None:
        """Claim rows that the rules would admit unchanged; None when the claim needs the rules."""
        owner = holder.owner
        witness = claim.witness or _NO_WITNESS
        parameters = {
            "owner": owner,
            "now": self.now,
            "witness": witness.seq,
            "nonce": witness.nonce,
            "token": witness.token,
        }
        facts = self._db.execute(statement("claim_facts"), parameters).fetchone()
        is_fenced, self.epoch, self.is_behind, has_due, has_due_gate, holds_suspect, paused = facts
        if is_fenced or self.epoch != holder.epoch:
            raise LeaseLost(owner)
        if self.is_behind or has_due_gate or (has_due and self.promote(self.now)):
            return None
        wanted = Wanted(
            due_by=self.now if claim.now is None else claim.now,
            queues=claim.queues,
            paused=frozenset(tables.decode_json(paused)),
            runnable=claim.runnable,
            suspects=not holds_suspect,
        )
        rows = await self.candidates(wanted, None, claim.limit)
        for row in rows:
            if row.gates or row.crashes or row_rules.is_expired(row, wanted.due_by):
                return None
        for row in rows:
            row_rules.claim(row, owner, self.now, self.epoch)
        if rows:
            self._claim(rows)
        return rows


def _hex(data: bytes | None) -> str:
    return (data or b"").hex().upper()
