"""Index: the names in the folder `tasks`, in memory, so that a claim need not list the folder.

It follows the changes of names that `FolderWatch` reports, in the order in which they happened. It may
be out of date, and it decides nothing: every step that matters is a rename, which fails when the index
was wrong. A file's contents are read once, before a claim.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import cast

from omniq.storage.file.encoding import WaitingRow
from omniq.storage.file.file_names import (
    AnyName,
    DocumentName,
    Marker,
    NewName,
    RowName,
    TakenName,
    parse,
)
from omniq.storage.file.wakeups import Event
from omniq.storage.incarnation import STORE
from omniq.storage.ready_rows import ReadyRows
from omniq.storage.row_rules import Row

_MAX_EXPECTED = 100_000
_MAX_STALE = 1_000


class Documents:
    """The names of the documents of one kind."""

    def __init__(self) -> None:
        self.by_key: dict[str, DocumentName] = {}
        self._due: list[tuple[int, DocumentName]] = []

    def put(self, name: DocumentName) -> None:
        """Add a document, or replace it."""
        self.by_key[name.key] = name
        if name.due is not None:
            heapq.heappush(self._due, (name.due, name))
        if len(self._due) > _MAX_STALE + 2 * len(self.by_key):
            # Names of replaced documents, which leave by themselves only when they would have been due.
            self._due = [(each.due, each) for each in self.by_key.values() if each.due is not None]
            heapq.heapify(self._due)

    def due_by(self, instant: int, limit: int, after: int) -> list[DocumentName]:
        """The first documents that are due at that instant, and were not at `after`, in order."""
        found: dict[DocumentName, int] = {}
        while self._due and self._due[0][0] <= instant and limit > 0:
            due, name = heapq.heappop(self._due)
            if self.by_key.get(name.key) == name:
                found[name] = due
                limit -= due > after
        for name, due in found.items():
            heapq.heappush(self._due, (due, name))
        return [name for name, due in found.items() if due > after]


class Index:
    """The names by what they stand for.

    `rows` and `documents` are current; `taken` are those that a write has taken, and `new` those that a
    write is about to add. `unread` are waiting tasks whose order is not known yet. Names that this
    process is about to add are not among them: `own_mark` is in all its contents.
    """

    def __init__(self, own_mark: str) -> None:
        self._own_mark = own_mark
        self.rows: dict[str, RowName] = {}
        self.ready = ReadyRows()
        self.unread: dict[str, RowName] = {}
        self.held: dict[str, dict[str, RowName]] = {}
        self.documents: dict[str, Documents] = {}
        self.taken: dict[str, TakenName] = {}
        self.new: dict[str, dict[str, NewName]] = {}
        self.writes: dict[str, dict[str, TakenName | NewName]] = {}
        self.markers: dict[str, Marker] = {}
        self.arrivals = 0
        """Counts the waiting tasks that other processes have added."""
        self._waiting: dict[str, WaitingRow] = {}
        self._expected: dict[str, tuple[AnyName, WaitingRow | None]] = {}

    @property
    def waiting_count(self) -> int:
        """The number of tasks that no owner holds."""
        return len(self.ready.rows) + len(self.unread)

    def is_live(self, task_id: str) -> bool:
        """Whether there is a live task with that id, also one that a write is changing."""
        return task_id in self.rows or task_id in self.taken

    def document(self, key: str) -> DocumentName | None:
        """The current name of the document with that key."""
        documents = self.documents.get(key.partition("~")[0])
        return None if documents is None else documents.by_key.get(key)

    def ids(self) -> set[str]:
        """The ids of all live tasks."""
        return {
            *self.rows,
            *(each.inner.key for each in self.taken.values() if isinstance(each.inner, RowName)),
        }

    # Changes

    def expect(self, text: str, name: AnyName, waiting: WaitingRow | None = None) -> None:
        """This process is adding a name: it is not an arrival, and need not be parsed or read."""
        if len(self._expected) > _MAX_EXPECTED:
            # Names of renames that failed: others were faster.
            self._expected.clear()
        self._expected[text] = name, waiting

    def apply(self, events: Iterable[Event], now: int) -> None:
        """Apply events in order."""
        for has_appeared, name in events:
            if name.endswith(".new") and self._own_mark in name:
                continue
            expected = self._expected.pop(name, None) if has_appeared else None
            if expected is not None:
                parsed, waiting = expected
                if waiting is not None:
                    self._waiting[waiting.id] = waiting
                self._add(parsed, name, now, is_own=True)
                continue
            found = parse(name) if has_appeared else self._known_of_write(name) or parse(name)
            if found is not None and has_appeared:
                self._add(found, name, now)
            elif found is not None:
                self._remove(found, name)

    def _known_of_write(self, name: str) -> TakenName | NewName | None:
        """The name if a write is known to have taken it: most names that disappear."""
        parts = name.rsplit(".", 2)
        return self.writes.get(parts[1], {}).get(name) if len(parts) == 3 else None

    @classmethod
    def rebuilt(cls, before: Index, names: Iterable[str], now: int) -> Index:
        """An index of all names of the folder; what was read of unchanged files stays."""
        index = cls(before._own_mark)
        index._waiting, index.arrivals = before._waiting, before.arrivals
        for name in names:
            found = parse(name)
            if found is not None and not index._is_of_earlier_epoch(found):
                is_known = isinstance(found, RowName) and found.key in before.rows
                index._add(found, name, now, is_own=is_known)
        index._waiting = {key: row for key, row in index._waiting.items() if key in index.rows}
        return index

    def _is_of_earlier_epoch(self, name: AnyName) -> bool:
        """Whether it is a record of the store that a restore has put back, and that was replaced since."""
        if not isinstance(name, DocumentName) or name.kind != STORE:
            return False
        known = self.document(name.key)
        return known is not None and (known.due or 0) > (name.due or 0)

    def _add(self, name: AnyName, text: str, now: int, *, is_own: bool = False) -> None:
        match name:
            case RowName():
                self._drop_row(name.key)
                self.rows[name.key] = name
                self._settle(name, text)
                if name.owner:
                    self.held.setdefault(name.owner, {})[name.key] = name
                else:
                    self._wait(name, now)
                    self.arrivals += not is_own and name.parked is None
            case DocumentName():
                self._settle(name, text)
                self.documents.setdefault(name.kind, Documents()).put(name)
            case NewName():
                self.new.setdefault(name.inner.key, {})[text] = name
                self.writes.setdefault(name.write, {})[text] = name
            case TakenName():
                self.discard(name.inner)
                self.taken[name.key] = name
                self.writes.setdefault(name.write, {})[text] = name
            case Marker():
                self.markers[name.write] = name

    def _settle(self, name: RowName | DocumentName, text: str) -> None:
        """Remove the names from which this name was renamed."""
        news = self.new.get(name.key)
        new = None if news is None else news.get(f"{text}.new")
        if new is not None:
            self._remove(new, f"{text}.new")
        taken = self.taken.get(name.key)
        if taken is not None and getattr(taken.inner, "content", None) == name.content:
            self._remove(taken, str(taken))

    def _wait(self, name: RowName, now: int) -> None:
        waiting = self._waiting.get(name.key)
        if waiting is None or waiting.content != name.content:
            self.unread[name.key] = name
        else:
            self._put(name, waiting, now)

    def set_order(self, name: RowName, waiting: WaitingRow, now: int) -> None:
        """The record of an unread task was read."""
        if self.unread.get(name.key) == name:
            del self.unread[name.key]
            waiting.content = name.content
            self._waiting[name.key] = waiting
            self._put(name, waiting, now)

    def _put(self, name: RowName, waiting: WaitingRow, now: int) -> None:
        gates = waiting.gates
        is_parked = name.parked is not None and name.parked < len(gates)
        waiting.parked = gates[name.parked or 0].key if is_parked else None
        # It has every field of a row that decides the order.
        self.ready.put(cast("Row", waiting), now)

    def discard(self, name: object) -> None:
        """Remove a current name, if it is the known one."""
        if isinstance(name, RowName) and self.rows.get(name.key) == name:
            self._drop_row(name.key)
        elif isinstance(name, DocumentName) and self.document(name.key) == name:
            del self.documents[name.kind].by_key[name.key]

    def _drop_row(self, key: str) -> None:
        before = self.rows.pop(key, None)
        if before is None:
            return
        if before.owner:
            held = self.held[before.owner]
            del held[key]
            if not held:
                del self.held[before.owner]
        elif self.unread.pop(key, None) is None:
            self.ready.discard(key)

    def _remove(self, name: AnyName, text: str) -> None:
        match name:
            case RowName() | DocumentName():
                self.discard(name)
            case NewName():
                news = self.new.get(name.inner.key, {})
                news.pop(text, None)
                if not news:
                    self.new.pop(name.inner.key, None)
                self._leave_write(name.write, text)
            case TakenName():
                if self.taken.get(name.key) == name:
                    del self.taken[name.key]
                    if name.key not in self.rows:
                        self._waiting.pop(name.key, None)
                self._leave_write(name.write, text)
            case Marker():
                if self.markers.get(name.write) == name:
                    del self.markers[name.write]

    def _leave_write(self, write: str, text: str) -> None:
        names = self.writes.get(write, {})
        names.pop(text, None)
        if not names:
            self.writes.pop(write, None)
