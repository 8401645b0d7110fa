"""Commits and snapshots as bytes.

A commit has effects: entries as they are afterwards. The process that appends it has decided once; none
decides again, so processes with other versions, keys and clocks read the same state out of a log.
A snapshot is a commit whose effects are all entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omniq.errors import SerializationError, StorageCorrupt, StorageRefused
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import Document
from omniq.storage.log.undoable_tables import Entry, UndoableTables
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.tables import StoredDead, StoredFence, StoredLease

_FORMAT = b"\x01"
"""The first byte of every commit and snapshot."""


class Effects(msgspec.Struct, array_like=True):
    """Entries that were stored, and entries that were removed. None is in both.

    A row has no body if the live row under the same id had the same body before.
    """

    rows: list[Row] = []
    finished: list[FinishedRow] = []
    dead: list[StoredDead] = []
    documents: list[Document] = []
    leases: list[StoredLease] = []
    fenced: dict[str, StoredFence] = {}
    removed: list[Entry] = []

    def apply(self, tables: UndoableTables, now: int) -> None:
        """Make the tables hold these entries."""
        # Ended rows first: they take their bodies from the live ones.
        for finished in self.finished:
            _fill_body(finished.row, tables)
            tables.put("finished", finished.row.id, finished)
        for dead in self.dead:
            _fill_body(dead.row, tables)
            tables.put("dead", dead.row.id, dead)
        for row in self.rows:
            tables.set_row(row.id, row, now)
        for document in self.documents:
            tables.set_document(document.kind, document.key, document)
        for lease in self.leases:
            tables.put("lease", lease.info.id, lease)
        for owner, fence in self.fenced.items():
            tables.put("fenced", owner, fence)
        for entry in self.removed:
            match entry:
                case ("row", task_id):
                    tables.set_row(task_id, None, now)
                case ("document", kind, key):
                    tables.set_document(kind, key, None)
                case (table, key):
                    tables.put(table, key, None)


class Commit(msgspec.Struct, array_like=True):
    """One change of the state: `previous` is the id of the commit before it.

    `time` is the store's time, which never decreases from commit to commit. `seq` is the last sequence number that was given to a task. `snapshot` is the number of the newest snapshot that the writer knows of.
    `competes`: whether the writer had to wait for others, or lost a race, before this commit was stored.
    """

    id: str
    previous: str
    time: int
    seq: int
    snapshot: int
    effects: Effects
    competes: bool = False

    @property
    def writer(self) -> str:
        """The process that has appended it."""
        return self.id.rpartition("-")[0]


def effects_of(before: Mapping[Entry, Any], after: Mapping[Entry, Any]) -> Effects:
    """The effects that change the entries from what they were before; None is no entry."""
    effects = Effects([], [], [], [], [], {}, [])
    for entry, value in after.items():
        match value:
            case Row():
                effects.rows.append(_without_body(value, before))
            case FinishedRow():
                row = _without_body(value.row, before)
                effects.finished.append(msgspec.structs.replace(value, row=row))
            case StoredDead():
                effects.dead.append(StoredDead(value.letter, _without_body(value.row, before)))
            case Document():
                effects.documents.append(value)
            case StoredLease():
                effects.leases.append(value)
            case StoredFence():
                effects.fenced[entry[1]] = value
            case None if before[entry] is not None:
                effects.removed.append(entry)
    return effects


def everything(tables: UndoableTables) -> Effects:
    """The effects that make empty tables equal to these."""
    return Effects(
        rows=list(tables.rows.values()),
        finished=list(tables.finished.values()),
        dead=list(tables.dead.values()),
        documents=[each for kind in tables.documents.values() for each in kind.by_key.values()],
        leases=list(tables.leases.values()),
        fenced=tables.fenced,
    )


def encode_commit(commit: Commit) -> bytes:
    """The commit as bytes."""
    return _FORMAT + encode_internal(commit)


def decode_commit(data: bytes) -> Commit:
    """The commit; `StorageRefused` for another format, `StorageCorrupt` for damaged bytes."""
    if data[:1] != _FORMAT:
        raise StorageRefused(
            "the log has a commit of a format that this version of omniq does not know: upgrade omniq"
        )
    try:
        return _decode(data[1:])
    except SerializationError as error:
        raise StorageCorrupt(f"a commit of the log is damaged: {error}") from error


def _without_body(row: Row, before: Mapping[Entry, Any]) -> Row:
    known = before.get(("row", row.id))
    if known is None or known.body != row.body:
        return row
    return msgspec.structs.replace(row, body=b"")


def _fill_body(row: Row, tables: UndoableTables) -> None:
    known = tables.rows.get(row.id)
    if known is not None and not row.body:
        row.body = known.body


_decode = internal_decoder(Commit)
