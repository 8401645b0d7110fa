"""One optimistic section: it reads without locks, and its write compares what was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

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
from omniq.storage.gate_states import DUE_GATES
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.pauses import PAUSED_QUEUE
from omniq.storage.redis import encoding
from omniq.storage.redis.encoding import instant_of, raw, stamp
from omniq.storage.redis.error_replies import OutOfMemory
from omniq.storage.row_rules import Row
from omniq.storage.schedule_engine import SCHEDULE
from omniq.storage.step import CHECKPOINT, NEWEST, PROGRESS
from omniq.storage.stored_output import OUTPUT, OUTPUT_PAGE
from omniq.storage.types import Claim

if TYPE_CHECKING:
    from omniq.storage.redis.backend import RedisBackend

_BOUNDED = frozenset({CHECKPOINT, NEWEST, PROGRESS, SCHEDULE, OUTPUT, OUTPUT_PAGE})
"""The kinds of documents that have a largest size: see `largest_value`."""

SHORT_TTL = 60_000_000
"""Microseconds of `result_ttl` below which a repeated enqueue may find no record of the first."""


class RedisSection(Section):
    """A section on the server of a backend."""

    def __init__(self, backend: RedisBackend, now: int) -> None:
        self.now = now
        self._backend = backend
        self._owner = ""
        # The rows that the owner has claimed, and whose outcomes are recorded without reading them again.
        self._known: dict[str, Row] = {}
        # What was read first of each row is what its change is based on.
        self._places: dict[str, bytes] = {}
        self._states: dict[str, bytes] = {}
        self._letters: dict[str, bytes] = {}
        # What `begin` has read already.
        self._paused: list[str] = []
        self._found: dict[DocumentQuery, list[Document]] = {}
        self._values: dict[str, bytes | None] = {}
        self._suspects: list[Row] = []
        self._first_rows: tuple[Wanted, int, list[Row]] | None = None

    # Reading

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        self._owner = owner
        # The write compares them.
        self._known = {row.id: row for row in known}
        if claim is not None:
            await self._read_ahead(claim, {gate.key for row in known for gate in row.gates})
        return frozenset(self._known)

    async def _read_ahead(self, claim: Claim, gates: set[str]) -> None:
        """Read in one call what a claim asks for."""
        due_by = "" if claim.now is None else stamp(claim.now)
        holder = self._backend.identity.holder(self._owner)
        self.epoch = holder.epoch
        reply = await self._backend.run(
            "begin_claim",
            self._owner,
            DUE_GATES,
            [f"{GATE}/{key}" for key in gates],
            (claim.limit, due_by, *self._backend.claim_arguments(claim.queues, claim.runnable)),
            holder.epoch,
            holder.beat,
            holder.claims,
        )
        if reply == b"lost":
            raise LeaseLost(self._owner)
        now, paused, due, suspects, is_partial, event, rows, others = reply
        self.now = int(now)
        self._paused = [queue.decode() for queue in paused]
        self._suspects = self._rows(suspects)
        self._values = {name.decode(): value or None for name, value in encoding.pairs(others)}
        self._found = {
            DocumentQuery(kind=PAUSED_QUEUE): [
                Document(PAUSED_QUEUE, queue, b"") for queue in self._paused
            ],
            DocumentQuery(kind=GATE, due_by=self.now, limit=DUE_GATES): _documents(due),
        }
        if not is_partial:
            self._backend.set_next_event(event)
            wanted = Wanted(
                due_by=self.now if claim.now is None else claim.now,
                queues=claim.queues,
                paused=frozenset(self._paused),
                runnable=claim.runnable,
                suspects=not self._suspects,
            )
            self._first_rows = (wanted, claim.limit, self._rows(rows))

    def _rows(self, reply: list[bytes]) -> list[Row]:
        rows = encoding.read_rows(reply)
        for row, place, state in zip(rows, reply[1::4], reply[3::4], strict=True):
            self._note(row.id, place, state)
        return rows

    def _note(self, task_id: str, place: bytes, state: bytes) -> None:
        # A known row must be as it was claimed, also if it is read for its body.
        if task_id not in self._places and task_id not in self._known:
            self._places[task_id] = place
            self._states[task_id] = state

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if not ids:
            return {}
        _, *reply = await self._backend.run("load", list(ids), int(bodies))
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
        if only_suspects and list(owners) == [self._owner]:
            return self._suspects
        if not owners:
            return []
        _, *reply = await self._backend.run("held", list(owners), int(only_suspects))
        return self._rows(reply)

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        first = self._first_rows
        if not wanted.only_looks:
            self._first_rows = None
        if first is not None and after is None and first[0] == wanted and limit <= first[1]:
            return first[2][:limit]
        if wanted.only_looks:
            queues, runnable, *waiting = wanted.queues, runnable_arguments(wanted.runnable), "", ""
        else:
            arguments = self._backend.claim_arguments(wanted.queues, wanted.runnable)
            queues, runnable, *waiting = arguments
        asked = (queues, sorted(wanted.paused), runnable, int(wanted.suspects))
        order = "" if after is None else encoding.order_text(after)
        while True:
            _, is_partial, event, rows = await self._backend.run(
                "candidates", stamp(wanted.due_by), asked, order, limit, *waiting
            )
            # Until all tasks that have come due are moved.
            if not is_partial:
                if not wanted.only_looks:
                    self._backend.set_next_event(event)
                return self._rows(rows)

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        names = [encoding.gate_name(key) for key in keys]
        _, *reply = await self._backend.run("parked", names, limit)
        return self._rows(reply)

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if not wanted:
            return {}
        names = [f"{kind}/{key}" for key in wanted]
        unread = [name for name in names if name not in self._values]
        if unread:
            scripts = self._backend.scripts
            if kind in _BOUNDED:
                values = await scripts.run("documents", unread)
            else:
                values = await scripts.command("HMGET", scripts.key("documents"), *unread)
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
        first = f"({kind}/{query.after}" if query.after > prefix else f"[{kind}/{prefix}"
        if query.due_after >= 0:
            # Behind all that are due then: a "/" follows the instant, and "0" follows that.
            first = f"[{kind}/{stamp(query.due_after)}0"
        _, *reply = await self._backend.run(
            "find_documents",
            kind,
            first,
            raw(f"[{kind}/{prefix}".encode() + b"\xff"),
            "" if query.due_by is None else stamp(query.due_by),
            query.limit,
        )
        return _documents(reply)

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        try:
            reply = await self._backend.run("write", *self._request(changes))
        except OutOfMemory as error:
            if not changes.inserted:
                raise
            counts = await self._backend.counts(only_waiting=True)
            raise QueueFull(counts.waiting) from error
        match reply:
            case b"moved":
                raise Moved
            case b"full":
                raise QueueFull(changes.bound or 0)
            case b"lost":
                raise LeaseLost(self._owner)
        return frozenset(task_id.decode() for task_id in reply)

    def _request(self, changes: Changes) -> tuple[Any, ...]:
        others = changes.claimed or changes.updated or changes.ended or changes.deleted_dead
        # A repeated enqueue finds its tasks; other calls have to know that they are repeats.
        is_recognized = changes.inserted and not (
            others or any(row.result_ttl < SHORT_TTL for row in changes.inserted)
        )
        plain: list[Ended] = []
        ended: list[Ended] = []
        for each in changes.ended:
            (plain if self._is_plain(each) else ended).append(each)
        return (
            "" if is_recognized else self._backend.new_nonce(),
            self._owner,
            self._paused if changes.claimed else 0,
            [
                *map(self._claim, changes.claimed),
                *(self._update(row, changes) for row in changes.updated),
                *map(self._end, ended),
                *(self._row_change(row, self._places[row.id]) for row in changes.checked),
            ],
            [document_change(change) for change in changes.documents],
            encoding.new_rows(changes.inserted),
            changes.bound or 0,
            [(name, raw(self._places.get(name, b""))) for name in changes.deleted_finished],
            [(name, raw(self._letters.get(name, b""))) for name in changes.deleted_dead],
            changes.finished_before or 0,
            encoding.end_groups(plain),
        )

    def _is_plain(self, ended: Ended) -> bool:
        """Whether the row was not read, because it is known as it was claimed, and no letter is stored."""
        return ended.letter is None and ended.row.id in self._known

    def _claim(self, row: Row) -> tuple[Any, ...]:
        # Of a row without gates, the claim can be left out alone.
        place = encoding.place_of(row, self.claim_id).encode()
        return self._row_change(row, place, is_optional=not row.gates)

    def _update(self, row: Row, changes: Changes) -> tuple[Any, ...]:
        state = b"" if row.id in changes.moved else encoding.state_of(row)
        if state == self._states.get(row.id):
            state = b""
        is_rewritten = row.id in changes.rewritten
        record = encoding.record_of(row) if is_rewritten else b""
        place = encoding.place_of(row).encode()
        return self._row_change(row, place, state=state, record=record, checks_state=is_rewritten)

    def _end(self, ended: Ended) -> tuple[Any, ...]:
        row = ended.row
        letter, failed_at = b"", 0
        if ended.letter is not None:
            letter, failed_at = encoding.dead_record(ended)
        place, record = b"", b""
        if row.result_ttl:
            place, record = encoding.ended_place(ended).encode(), encoding.end_record(ended)
        return self._row_change(row, place, record=record, letter=letter, failed_at=failed_at)

    def _row_change(
        self,
        row: Row,
        place: bytes,
        *,
        state: bytes = b"",
        record: bytes = b"",
        letter: bytes = b"",
        failed_at: int = 0,
        is_optional: bool = False,
        checks_state: bool = False,
    ) -> tuple[Any, ...]:
        before, is_start = self._places.get(row.id), 0
        if before is None:
            # Without the id of its claim.
            before, is_start = encoding.place_of(self._known[row.id]).encode(), 1
        parts = (before, place, state, record, letter)
        known: Any = 0
        if (checks_state or row.workflow is not None) and row.id in self._states:
            # Others may change it without changing its place.
            known = raw(self._states[row.id])
        return (row.id, *map(raw, parts), failed_at, is_start, int(is_optional), known)


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


def _documents(reply: list[bytes]) -> list[Document]:
    return [read_document(name.decode(), value) for name, value in encoding.pairs(reply) if value]


def runnable_arguments(runnable: Runnable | None) -> Any:
    """What an owner can run, as `lua/lib/candidates.lua` takes it."""
    if runnable is None:
        return (0, (), ())
    modules = 0 if runnable.modules is None else runnable.modules
    return (modules, sorted(runnable.names), sorted(runnable.excluded))
