"""Tables that remember what each changed entry was before and is now.

That gives both the effects of a commit and the way back when another process commits first.
"""

from __future__ import annotations

from typing import Any

from omniq.storage.backend import Document
from omniq.storage.row_rules import Row
from omniq.storage.tables import Tables

Entry = tuple[str, ...]
"""The name of a table and a key in it; of a document, its kind and its key."""


class UndoableTables(Tables):
    """The state of a store. Between `begin` and `end` it remembers changes; None is no entry."""

    def __init__(self) -> None:
        super().__init__()
        self._remembers = False
        self.seq_before = 0
        self.before: dict[Entry, Any] = {}
        self.after: dict[Entry, Any] = {}

    def begin(self) -> None:
        """Remember changes from now on."""
        self._remembers = True
        self.seq_before = self.seq

    def end(self) -> None:
        """Forget all changes: they are committed or undone."""
        self._remembers = False
        self.before, self.after = {}, {}

    def _remember(self, entry: Entry, before: Any, after: Any) -> None:
        if self._remembers:
            self.before.setdefault(entry, before)
            self.after[entry] = after

    def set_row(self, task_id: str, row: Row | None, now: int) -> None:
        self._remember(("row", task_id), self.rows.get(task_id), row)
        super().set_row(task_id, row, now)

    def set_claimed(self, rows: list[Row], now: int) -> None:
        for row in rows:
            self.set_row(row.id, row, now)

    def put(self, table: str, key: str, value: Any) -> None:
        self._remember((table, key), self._tables[table].get(key), value)
        super().put(table, key, value)

    def set_document(self, kind: str, key: str, document: Document | None) -> None:
        self._remember(("document", kind, key), self.document(kind, key), document)
        super().set_document(kind, key, document)
