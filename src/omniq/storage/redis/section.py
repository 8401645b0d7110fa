"""One optimistic section: it reads without locks, and its write compares what was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from omniq.errors import LeaseLost, QueueFull
from omniq.models import Runnable
from omniq.storage.backend import (
    ANY,
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    Ended,
    Moved,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.redis import encoding
from omniq.storage.redis.connection import OutOfMemory
from omniq.storage.redis.encoding import instant_of, stamp
from omniq.storage.redis.scripts import raw
from omniq.storage.row_rules import Row

SHORT_TTL = 60_000_000
"""Microseconds of `result_ttl` below which a repeated enqueue may find no record of the first."""


class Server(Protocol):
    """What a section needs of its backend."""

    async def run(self, name: str, *arguments: Any) -> Any:
        """Run a script."""

    async def read_fields(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Read fields of a hash."""

    async def run_candidates(self, wanted: Wanted, *arguments: Any) -> list[bytes]:
        """Run the script `candidates`, until it has moved all tasks that have come due."""

    async def count_waiting(self) -> int:
        """The number of tasks that wait for a run."""

    def note_used(self, names: list[str]) -> None:
        """Note which documents claims use: the next claim probably uses them again."""

    def new_nonce(self) -> str:
        """A text that no other call has."""


class RedisSection(Section):
    """A section. `claims_as` is the owner that claims in it."""

    def __init__(self, server: Server, now: int, claims_as: str = "") -> None:
        self.now = now
        self._server = server
        self._claims_as = claims_as
        # What was read first of each row is what its change is based on.
        self._places: dict[str, bytes] = {}
        self._states: dict[str, bytes] = {}
        self._letters: dict[str, bytes] = {}
        # What `begin_claim` has read already.
        self._paused: list[str] | int = 0
        self._found: dict[DocumentQuery, list[Document]] = {}
        self._values: dict[str, bytes | None] = {}
        self._suspects: list[Row] = []

    # Reading

    def prefetch(
        self,
        found: dict[DocumentQuery, list[Document]],
        values: dict[str, bytes | None],
        paused: list[str],
        suspects: list[bytes],
    ) -> None:
        """Use what a claim has read in one call."""
        self._found, self._values, self._paused = found, values, paused
        self._suspects = self._rows(suspects)

    def _rows(self, reply: list[bytes]) -> list[Row]:
        rows: list[Row] = []
        for row, place, state in encoding.read_rows(reply):
            self._note(row.id, place, state)
            rows.append(row)
        return rows

    def _note(self, task_id: str, place: bytes, state: bytes) -> None:
        if task_id not in self._places:
            self._places[task_id] = place
            self._states[task_id] = state

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if not ids:
            return {}
        _, *reply = await self._server.run("load", list(ids), int(bodies))
        found: dict[str, Record] = {}
        for number, task_id in enumerate(ids):
            place, record, state, dead = reply[4 * number : 4 * number + 4]
            self._note(task_id, place, state)
            if dead:
                self._letters.setdefault(task_id, dead)
            stored = encoding.read_record(task_id, place, record, state, dead)
            if stored is not None and record:
                found[task_id] = stored
        return found

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        if only_suspects and list(owners) == [self._claims_as]:
            return self._suspects
        if not owners:
            return []
        _, *reply = await self._server.run("held", list(owners), int(only_suspects))
        return self._rows(reply)

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        order = "" if after is None else encoding.order_text(after)
        asked = (
            0 if wanted.queues is None else wanted.queues,
            sorted(wanted.paused),
            runnable_arguments(wanted.runnable),
            int(wanted.suspects),
        )
        due_by = stamp(wanted.due_by)
        return self._rows(await self._server.run_candidates(wanted, due_by, asked, order, limit))

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        names = [encoding.gate_name(key) for key in keys]
        _, *reply = await self._server.run("parked", names, limit)
        return self._rows(reply)

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if not wanted:
            return {}
        names = [f"{kind}/{key}" for key in wanted]
        if self._claims_as:
            self._server.note_used(names)
        unread = [name for name in names if name not in self._values]
        if unread:
            values = await self._server.read_fields("documents", unread)
            self._values.update(zip(unread, values, strict=True))
        return {
            key: read_document(name, value)
            for key, name in zip(wanted, names, strict=True)
            if (value := self._values[name]) is not None
        }

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        if query in self._found:
            return self._found[query]
        kind, prefix = query.kind, query.prefix
        _, *reply = await self._server.run(
            "find_documents",
            kind,
            f"({kind}/{query.after}" if query.after > prefix else f"[{kind}/{prefix}",
            raw(f"[{kind}/{prefix}".encode() + b"\xff"),
            "" if query.due_by is None else stamp(query.due_by),
            query.limit,
        )
        return [read_document(name.decode(), value) for name, value in encoding.pairs(reply)]

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        try:
            reply = await self._server.run("write", *self._request(changes))
        except OutOfMemory as error:
            if not changes.inserted:
                raise
            raise QueueFull(await self._server.count_waiting()) from error
        match reply:
            case b"moved":
                raise Moved
            case b"full":
                raise QueueFull(changes.bound or 0)
            case b"lost":
                raise LeaseLost(self._claims_as)
        return frozenset(task_id.decode() for task_id in reply)

    def _request(self, changes: Changes) -> tuple[Any, ...]:
        others = changes.claimed or changes.updated or changes.ended or changes.deleted_dead
        # A repeated enqueue finds its tasks; other calls have to know that they are repeats.
        is_recognized = changes.inserted and not (
            others or any(row.result_ttl < SHORT_TTL for row in changes.inserted)
        )
        return (
            "" if is_recognized else self._server.new_nonce(),
            self._claims_as if changes.claimed else "",
            self._paused if changes.claimed else 0,
            self._row_changes(changes),
            [document_change(change) for change in changes.documents],
            [inserted(row) for row in changes.inserted],
            changes.bound or 0,
            [
                (task_id, raw(self._places.get(task_id, b"")))
                for task_id in changes.deleted_finished
            ],
            [(task_id, raw(self._letters.get(task_id, b""))) for task_id in changes.deleted_dead],
            changes.finished_before or 0,
        )

    def _row_changes(self, changes: Changes) -> list[tuple[Any, ...]]:
        rows = [
            self._row_change(row, encoding.place_of(row, self.claim_id), is_optional=not row.gates)
            for row in changes.claimed
        ]
        for row in changes.updated:
            state = encoding.state_of(row)
            state = b"" if state == self._states[row.id] else state
            rows.append(self._row_change(row, encoding.place_of(row), state))
        rows += [self._end(ended) for ended in changes.ended]
        for row in changes.checked:
            place = raw(self._places[row.id])
            rows.append((row.id, place, place, "", "", "", 0, 0))
        return rows

    def _row_change(
        self, row: Row, place: str, state: bytes = b"", *, is_optional: bool = False
    ) -> tuple[Any, ...]:
        before = raw(self._places[row.id])
        return (row.id, before, place, raw(state), "", "", 0, int(is_optional))

    def _end(self, ended: Ended) -> tuple[Any, ...]:
        row = ended.row
        letter, failed_at = b"", 0
        if ended.letter is not None:
            letter, failed_at = encoding.dead_record(ended)
        place, record = "", b""
        if row.result_ttl:
            place, record = encoding.ended_place(ended), encoding.end_record(ended)
        before = raw(self._places[row.id])
        return (row.id, before, place, "", raw(record), raw(letter), failed_at, 0)


def inserted(row: Row) -> tuple[Any, ...]:
    """A new row as `lua/lib/changes.lua` takes it."""
    return (row.id, encoding.head_of(row), encoding.foot_of(row), raw(encoding.record_of(row)))


def document_change(change: DocumentChange) -> tuple[Any, ...]:
    """A change as `lua/lib/documents.lua` takes it."""
    check = 2
    if change.before is ANY:
        check = 0
    elif change.if_equal:
        check = 3
    elif change.before is None:
        check = 1
    return (
        f"{change.kind}/{change.key}",
        check,
        raw(change.before) if check > 1 and change.before is not None else "",
        int(change.after is not None),
        raw(change.after or b""),
        "" if change.due is None else stamp(change.due),
    )


def read_document(name: str, value: bytes) -> Document:
    """A stored document."""
    kind, _, key = name.partition("/")
    due, _, data = value.partition(b"/")
    if not due:
        return Document(kind, key, data)
    # A value that was not written by omniq is returned as it is, and cannot be decoded.
    return (
        Document(kind, key, data, instant_of(due.decode()))
        if due.isdigit()
        else Document(kind, key, value)
    )


def runnable_arguments(runnable: Runnable | None) -> Any:
    """What an owner can run, as `lua/lib/candidates.lua` takes it."""
    if runnable is None:
        return (0, (), ())
    modules = 0 if runnable.modules is None else runnable.modules
    return (modules, sorted(runnable.names), sorted(runnable.excluded))
