"""Sequences: of the tasks with one key, each waits for the one before it, in the order of their enqueue.

A row knows the row that it follows, while it waits for it, and the row that follows it. A document for each key
names the last task: the next enqueue changes that task's row, so that a concurrent step that ends it is repeated.
A key without live tasks has no document; one whose last task has ended was left behind, and counts as none.

When the first task ends, the step that ends it releases the next one. A task that ends while it waits is left out: the one
behind it then waits for the one before it. With `halts`, the dead letter of a task stays in front: the document
names it and the task that waits for it, until it is retried or deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage import row_rules
from omniq.storage.backend import DocumentChange, Record, Section
from omniq.storage.row_rules import Row

SEQUENCE = "sequence"
"""The kind of the documents that name the last task of each sequence."""

UNKNOWN = ""
"""What a row follows that was enqueued in a caller's transaction, until the maintenance of a worker stores it."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last live task of a sequence; the dead letter that holds the others, and the first of them."""

    last: str
    halted: str | None = None
    first: str | None = None


decode_line = lenient_decoder(Line, None)


class Rows(Protocol):
    """The rows of one step."""

    async def read(self, ids: Iterable[str], /) -> Any:
        """Read these rows, as far as they were not read yet."""
        ...

    def live(self, task_id: str, /) -> Row | None:
        """A row that was read, or that is new, and has not ended."""
        ...

    def update(self, row: Row, /) -> None:
        """Write the row at the end of the step."""
        ...


class LoadedRows:
    """The rows of a step that changes nothing else."""

    def __init__(self, section: Section, updated: Sequence[Row] = ()) -> None:
        self._section = section
        self._found = {row.id: Record(row) for row in updated}
        self.updated = {row.id: row for row in updated}

    async def read(self, ids: Iterable[str], /) -> None:
        unread = [each for each in dict.fromkeys(ids) if each not in self._found]
        self._found |= await self._section.load(unread)

    def live(self, task_id: str, /) -> Row | None:
        record = self._found.get(task_id)
        return record.row if record is not None and record.is_live else None

    def update(self, row: Row, /) -> None:
        self.updated[row.id] = row


def key_of(row: Row) -> str | None:
    """The sequence of a row, if it has one."""
    return None if row.workflow is None else row.workflow.sequence


class Sequences:
    """What one step changes in sequences."""

    def __init__(self, section: Section, rows: Rows) -> None:
        self._section = section
        self._rows = rows
        self._stored: dict[str, bytes | None] = {}
        self._lines: dict[str, Line | None] = {}
        self._freed: dict[str, DocumentChange] = {}
        self.released: list[Row] = []

    def changes(self) -> list[DocumentChange]:
        """The documents that have changed."""
        changed = [*self._freed.values()]
        for key, line in self._lines.items():
            before = self._stored[key]
            after = None if line is None else encode_internal(line)
            if after != before:
                changed.append(DocumentChange(SEQUENCE, key, before, after))
        return changed

    async def _read(self, keys: Iterable[str]) -> None:
        unread = [each for each in dict.fromkeys(keys) if each not in self._lines]
        if unread:
            found = await self._section.documents(SEQUENCE, unread)
            for key in unread:
                # A change that was planned without reading is made to what is stored.
                self._freed.pop(key, None)
                data = self._stored[key] = found[key].data if key in found else None
                self._lines[key] = decode_line(data) if data else None

    # Rows that join

    async def join(self, rows: Sequence[Row]) -> None:
        """Add rows behind all others of their sequences; the caller writes these rows."""
        keys = [key for row in rows if (key := key_of(row)) is not None]
        await self._read(keys)
        lines = [line for key in keys if (line := self._lines[key]) is not None]
        await self._rows.read([line.last for line in lines])
        joined = {row.id: row for row in rows}
        for row in rows:
            key = key_of(row)
            if key is not None:
                self._append(key, row, joined)

    def _append(self, key: str, row: Row, joined: Mapping[str, Row]) -> None:
        line = self._lines[key]
        row_rules.be_followed(row, None)
        if line is not None and line.last == line.halted:
            row_rules.follow(row, line.halted)
            self._lines[key] = replace(line, last=row.id, first=row.id)
            return
        last = None if line is None else joined.get(line.last) or self._rows.live(line.last)
        if line is None or last is None or key_of(last) != key:
            row_rules.follow(row, None)
            self._lines[key] = Line(row.id)
            return
        row_rules.follow(row, last.id)
        row_rules.be_followed(last, row.id)
        if last.id not in joined:
            self._rows.update(last)
        self._lines[key] = replace(line, last=row.id)

    async def rejoin(self, rows: Sequence[Row]) -> None:
        """Add rows that had ended: a dead letter that holds its sequence in front, the others behind all."""
        await self._read(key for row in rows if (key := key_of(row)) is not None)
        behind: list[Row] = []
        for row in rows:
            line = self._lines.get(key_of(row) or "")
            if line is None or line.halted != row.id:
                behind.append(row)
                continue
            row_rules.follow(row, None)
            row_rules.be_followed(row, line.first)
            self._lines[key_of(row) or ""] = Line(line.last)
        await self.join(behind)

    # Rows that end

    async def leave(self, rows: Sequence[Row], dead: frozenset[str]) -> None:
        """Take rows that have ended out of their sequences, and release those that are first now."""
        rows = [row for row in rows if key_of(row) is not None]
        around = [
            each
            for row in rows
            if row.workflow is not None
            for each in (row.workflow.follows, row.workflow.followed_by)
            if each
        ]
        await self._rows.read(around)
        await self._read(
            key_of(row) or "" for row in rows if row.id in dead or _follows(row) is not None
        )
        ended = {row.id: row for row in rows}
        for row in rows:
            self._leave(row, ended, is_dead=row.id in dead)

    def _leave(self, row: Row, ended: Mapping[str, Row], *, is_dead: bool) -> None:
        key, workflow = key_of(row), row.workflow
        assert key is not None
        assert workflow is not None
        before, behind = workflow.follows, workflow.followed_by
        following = None if behind is None else ended.get(behind) or self._rows.live(behind)
        if before == UNKNOWN:
            return
        if before is not None:
            self._leave_out(key, row, before, following, ended)
        elif is_dead and workflow.halts:
            last = self._lines[key]
            self._lines[key] = Line(row.id if last is None else last.last, row.id, behind)
        elif following is not None:
            self._follow(following, None, ended)
        elif key in self._lines:
            self._lines[key] = None
        else:
            data = encode_internal(Line(row.id))
            self._freed[key] = DocumentChange(SEQUENCE, key, data, None, if_equal=True)

    def _leave_out(
        self, key: str, row: Row, before: str, following: Row | None, ended: Mapping[str, Row]
    ) -> None:
        """Have what follows the row wait for what the row waits for."""
        behind = None if following is None else following.id
        previous, line = ended.get(before) or self._rows.live(before), self._lines[key]
        if line is not None and line.last == row.id:
            line = replace(line, last=before)
        if line is not None and line.halted == before:
            line = replace(line, first=behind)
        elif previous is not None:
            row_rules.be_followed(previous, behind)
            if before not in ended:
                self._rows.update(previous)
        self._lines[key] = line
        if following is not None:
            self._follow(following, before, ended)

    def _follow(self, row: Row, before: str | None, ended: Mapping[str, Row]) -> None:
        row_rules.follow(row, before)
        if row.id in ended:
            return
        if before is None and not row_rules.is_waiting(row):
            row_rules.make_claimable(row, self._section.now)
            self.released.append(row)
        self._rows.update(row)

    # Dead letters that are deleted

    async def let_go(self, rows: Sequence[Row]) -> None:
        """Release what waits for dead letters that are deleted."""
        rows = [row for row in rows if key_of(row) is not None]
        if not rows:
            return
        await self._read(key_of(row) or "" for row in rows)
        halted = [
            (key_of(row) or "", line)
            for row in rows
            if (line := self._lines[key_of(row) or ""]) is not None and line.halted == row.id
        ]
        await self._rows.read(line.first for _, line in halted if line.first)
        for key, line in halted:
            first = self._rows.live(line.first or "")
            self._lines[key] = None if first is None else Line(line.last)
            if first is not None:
                self._follow(first, None, {})


def _follows(row: Row) -> str | None:
    return None if row.workflow is None else row.workflow.follows
