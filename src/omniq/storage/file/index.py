"""Index: the names in the folder `tasks`, in memory, so that a claim need not list the folder.

It follows the changes of names that `FolderWatch` reports, in the order in which they happened. It may
be out of date, and it decides nothing: every step that matters is a rename, which fails when the index
was wrong. A file's contents are read once, before a claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from omniq.storage.file.encoding import WaitingRow
from omniq.storage.file.file_names import AnyName, DocumentName, RowName, WriteName, parse
from omniq.storage.file.wakeups import Event
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.ready_rows import ReadyRows
from omniq.storage.row_rules import Row
from omniq.storage.tables import Documents

T = TypeVar("T")

_MAX_EXPECTED = 100_000


class Index:
    """The names by what they stand for.

    `rows` and `documents` are current; `taken` are those that a write has taken, and `new` those that a
    write is about to add. `writes` has both by their write, and `markers` the endings of the markers.
    `unread` are waiting tasks whose order is not known yet. Names that this process is about to add are
    not among them: `own_mark` is in all its contents.
    """

    def __init__(self, own_mark: str) -> None:
        self._own_mark = own_mark
        self.rows: dict[str, RowName] = {}
        self.ready = ReadyRows()
        self.unread: dict[str, RowName] = {}
        self.held: dict[str, dict[str, RowName]] = {}
        self.documents: dict[str, Documents[DocumentName]] = {}
        self.taken: dict[str, WriteName] = {}
        self.new: dict[str, dict[str, WriteName]] = {}
        self.writes: dict[str, dict[str, WriteName]] = {}
        self.markers: dict[str, str] = {}
        self.arrivals = 0
        """Counts the waiting tasks that other processes have added."""
        self.doubles: list[RowName | DocumentName] = []
        """Names that appeared beside another current name of the same key: a restore has put them back."""
        self._waiting: dict[str, WaitingRow] = {}
        self._expected: dict[str, tuple[AnyName, WaitingRow | None]] = {}

    @property
    def waiting_count(self) -> int:
        """The number of tasks that no owner holds."""
        return len(self.ready.rows) + len(self.unread)

    def next_due(self) -> int | None:
        """When the first delayed task becomes visible, or a gate may have room for parked ones."""
        gates = self.documents.get(GATE)
        instants = (self.ready.next_due(), None if gates is None else gates.next_due())
        return min((each for each in instants if each is not None), default=None)

    def is_live(self, task_id: str) -> bool:
        """Whether there is a live task with that id, also one that a write is changing."""
        return task_id in self.rows or task_id in self.taken

    def document(self, key: str) -> DocumentName | None:
        """The current name of the document with that key."""
        documents = self.documents.get(key.partition("~")[0])
        return None if documents is None else documents.by_key.get(key)

    def current(self, key: str) -> RowName | DocumentName | None:
        """The current name of the task or document with that key."""
        return self.document(key) if "~" in key else self.rows.get(key)

    def taken_rows(self) -> list[RowName]:
        """The names of tasks that a write has taken."""
        return [each.inner for each in self.taken.values() if isinstance(each.inner, RowName)]

    def ids(self) -> set[str]:
        """The ids of all live tasks."""
        return {*self.rows, *(name.key for name in self.taken_rows())}

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

    def _known_of_write(self, name: str) -> WriteName | None:
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
            if found is not None:
                is_known = isinstance(found, RowName) and found.key in before.rows
                index._add(found, name, now, is_own=is_known, is_listed=True)
        index._waiting = {key: row for key, row in index._waiting.items() if key in index.rows}
        return index

    def _is_double(self, name: RowName | DocumentName, is_listed: bool) -> bool:
        """Whether there is another current name, of which it is not a rename: that raises the version.

        One listing names both only if both are there, or the file was renamed meanwhile; `TaskFiles` asks.
        """
        known = self.current(name.key)
        if known is None or known == name:
            return False
        if not is_listed and isinstance(known, RowName) and isinstance(name, RowName):
            return known.content != name.content or known.version >= name.version
        return True

    def replace(
        self, known: RowName | DocumentName | None, name: RowName | DocumentName, now: int
    ) -> None:
        """Make a double the current name."""
        self.discard(known)
        self._add(name, str(name), now)

    def _add(
        self, name: AnyName, text: str, now: int, *, is_own: bool = False, is_listed: bool = False
    ) -> None:
        if isinstance(name, WriteName):
            self._add_of_write(name, text)
            return
        if self._is_double(name, is_listed):
            self.doubles.append(name)
            return
        if isinstance(name, DocumentName):
            self._settle(name, text)
            self.documents.setdefault(name.kind, Documents()).put(name)
            return
        self._drop_row(name.key)
        self.rows[name.key] = name
        self._settle(name, text)
        if name.owner:
            self.held.setdefault(name.owner, {})[name.key] = name
        else:
            self._wait(name, now)
            self.arrivals += not is_own and name.parked is None

    def _add_of_write(self, name: WriteName, text: str) -> None:
        if name.inner is None:
            self.markers[name.write] = name.ending
            return
        self.writes.setdefault(name.write, {})[text] = name
        if name.ending == "new":
            self.new.setdefault(name.inner.key, {})[text] = name
        else:
            self.discard(name.inner)
            self.taken[name.inner.key] = name

    def _settle(self, name: RowName | DocumentName, text: str) -> None:
        """Remove the names from which this name was renamed."""
        new = self.new.get(name.key)
        if new is not None and f"{text}.new" in new:
            self._remove(new[f"{text}.new"], f"{text}.new")
        taken = self.taken.get(name.key)
        if taken is not None and taken.inner is not None and taken.inner.content == name.content:
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
            _remove_from(self.held, before.owner, key)
        elif self.unread.pop(key, None) is None:
            self.ready.discard(key)

    def _remove(self, name: AnyName, text: str) -> None:
        if not isinstance(name, WriteName):
            self.discard(name)
        elif name.inner is None:
            if self.markers.get(name.write) == name.ending:
                del self.markers[name.write]
        else:
            key = name.inner.key
            if name.ending == "new":
                _remove_from(self.new, key, text)
            elif self.taken.get(key) == name:
                del self.taken[key]
                if key not in self.rows:
                    self._waiting.pop(key, None)
            _remove_from(self.writes, name.write, text)


def _remove_from(names: dict[str, dict[str, T]], key: str, text: str) -> None:
    """Remove a name from a group, and the group with its last name."""
    group = names.get(key)
    if group is not None and group.pop(text, None) is not None and not group:
        del names[key]
