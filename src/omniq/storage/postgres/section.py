"""Section: one read-modify-write without a transaction.

Each read is one statement. The write is one call of an SQL function, which compares the versions of the
rows that it changes and the documents that were read, and writes everything or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.storage.backend import (
    Changes,
    Document,
    DocumentQuery,
    Order,
    PerhapsWritten,
    Record,
    Section,
    Wanted,
)
from omniq.storage.gate_states import DUE_GATES, decode_gate
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.pauses import PAUSED_QUEUE
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import ReplyLost
from omniq.storage.postgres.enqueue import enqueue
from omniq.storage.postgres.statements import Statements
from omniq.storage.row_codec import letter_of
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.schedule_engine import SCHEDULE
from omniq.storage.store_clock import given_time, observe
from omniq.storage.types import Claim, Holder

_FIRST = (-(2**63) + 1, -(2**63), -1)
_SEQ, _GATE_KEYS, _VERSION = 1, 21, 22
"""Positions of columns in what is read: see the SQL type `task`."""

_GATE, _DUE_GATE, _PAUSED = -1, -3, -4
"""The `seq` of lines that are no tasks: see `with_gates.sql` and the SQL function `begin_claim`."""

_AFTER_ALL = "\U0010ffff"

# The state of a gate has no limit: a rate limit has many starts.
_DATA = "CASE kind WHEN 'gate' THEN data ELSE {schema}.fitting(data) END"
_DOCUMENTS = (
    f"SELECT key, {_DATA}, due FROM {{schema}}.documents WHERE kind = $1 AND key = ANY ($2)"
)
_FIND = f"SELECT kind, key, {_DATA}, due FROM {{schema}}.documents WHERE kind = $1 AND "
_FIND_BY_KEY = _FIND + "key > $2 AND key >= $3 AND key < $4 ORDER BY key LIMIT $5"
_FIND_DUE = _FIND + "due > $2 AND due <= $3 ORDER BY due LIMIT $4"
_CLAIMED = "SELECT id FROM {schema}.live WHERE place = 4 AND owner = $1 AND claim_id = $2 AND id = ANY ($3)"


class _ReadAhead(msgspec.Struct):
    """What the first statement of a claim has read: the first `limit` rows that are `wanted`.

    `rows` is None after they were asked for, and if more tasks are due than one statement moves.
    `parked` has the first rows of each gate that the step's outcomes leave, until they were asked for.
    """

    wanted: Wanted
    limit: int
    due_gates: list[Document]
    rows: list[Row] | None
    parked: dict[str, list[Row]]


class PostgresSection(Section):
    """A section. `holder` may claim in it, with the name `claim_id`."""

    def __init__(
        self,
        statements: Statements,
        clock: Clock,
        *,
        holder: Holder | None = None,
        claim_id: str = "",
    ) -> None:
        self.now = clock.micros()
        self._statements = statements
        self._clock = clock
        self._owner = ""
        self._holder = holder
        self._claim_id = claim_id
        self._tokens: dict[str, int] = {}
        self._lines: dict[str, Any] = {}
        self._gates: dict[str, Document | None] = {}
        self._ahead: _ReadAhead | None = None
        self.claim: Claim | None = None
        self.claimed = 0
        self.next_due: int | None = None
        """The claim of this section, the number of rows that it got, and when the next task is due."""

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        """Read in one statement what a claim asks for; `LeaseLost` if the owner has no lease.

        That the known rows are still held is checked by the write.
        """
        self._owner = owner
        self._tokens = {row.id: row.token for row in known}
        if claim is not None:
            keys = {gate.key for row in known for gate in row.gates}
            await self._begin_claim(claim, list(keys))
        return frozenset(self._tokens)

    async def _begin_claim(self, claim: Claim, keys: list[str]) -> None:
        beat = 0 if self._holder is None else self._holder.beat
        given = encoding.wanted_tasks(claim.queues, claim.runnable)
        sent_at = self._clock.boot_micros()
        facts, *lines = await self._statements.with_gates(
            "begin_claim",
            self._owner,
            given_time(self._clock),
            encoding.claim(claim, given, name="", beat=beat),
            DUE_GATES,
            keys,
        )
        self.now = facts["turn"]
        observe(self._clock, self.now, sent_at=sent_at)
        if self._holder is None or facts["due"] != self._holder.epoch:
            raise LeaseLost(self._owner)
        self.epoch = self._holder.epoch
        self.claim, self.next_due = claim, facts["visible"]
        self._claim_id = claim.claim_id or self._claim_id
        self._gates.update(dict.fromkeys(keys))
        special: dict[int | None, list[Any]] = {None: [], _DUE_GATE: [], _PAUSED: []}
        others: list[Any] = []
        for line in lines:
            special.get(line[_SEQ], others).append(line)
        wanted = Wanted(
            due_by=self.now if claim.now is None else claim.now,
            queues=claim.queues,
            paused=frozenset(line["id"] for line in special[_PAUSED]),
            runnable=claim.runnable,
            suspects=not facts["crashes"],
        )
        due_gates = [_gate(line) for line in special[_DUE_GATE]]
        parked: dict[str, list[Row]] = {key: [] for key in keys}
        ready: list[Row] = []
        for row in self._rows(others):
            # A ready row that has the name of a gate was not written by omniq.
            parked.get(row.parked or "", ready).append(row)
        is_complete = not special[None]
        self._ahead = _ReadAhead(
            wanted, facts["token"], due_gates, ready if is_complete else None, parked
        )

    # Reading

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if not ids:
            return {}
        lines = await self._statements.file("load", list(ids), self.now, bodies)
        # The last two columns are those of a record and of a dead letter.
        live = self._rows(line for line in lines if line[-2] is None and line[-1] is None)
        records = {row.id: Record(row) for row in live}
        for line in lines:
            *_, finished_at, expires_at, result, letter = line
            if result is not None:
                row = encoding.row_from(line)
                finished = FinishedRow(
                    row=row, finished_at=finished_at, expires_at=expires_at, result=result
                )
                records[row.id] = Record(row, finished)
            elif letter is not None:
                known = records.get(line["id"])
                row = encoding.row_from(line)
                records[row.id] = Record(
                    row,
                    None if known is None else known.finished,
                    letter_of(letter, row.id, row.func_path),
                )
        return records

    def _rows(self, lines: Iterable[Any]) -> list[Row]:
        """The rows of these lines; also notes their versions, and the gates that are among them."""
        rows: list[Row] = []
        for line in lines:
            if line[_SEQ] == _GATE:
                self._gates[line["id"]] = _gate(line)
                continue
            row = encoding.row_from(line, line[_GATE_KEYS])
            # If it is read twice, the first version is the one that the changes are based on.
            self._lines.setdefault(row.id, line)
            for key in line[_GATE_KEYS] or ():
                self._gates.setdefault(key, None)
            rows.append(row)
        return rows

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        if only_suspects and self._ahead is not None and self._ahead.wanted.suspects:
            return []
        return self._rows(await self._statements.file("held", list(owners), only_suspects))

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        ahead = self._ahead
        if after is None and ahead is not None and ahead.rows is not None:
            rows, ahead.rows = ahead.rows, None
            if wanted == ahead.wanted and limit <= ahead.limit:
                return rows[:limit]
        rank, turn, seq = _FIRST if after is None else after
        while True:
            lines = await self._statements.with_gates(
                "candidates",
                sorted(wanted.paused),
                encoding.wanted_tasks(wanted.queues, wanted.runnable),
                wanted.suspects,
                wanted.due_by,
                rank - 1,
                turn,
                seq,
                limit,
            )
            if not lines or lines[0]["id"] is not None:
                return self._rows(lines)

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        ahead = {} if self._ahead is None else self._ahead.parked
        if limit == 1 and all(key in ahead for key in keys):
            return [row for key in keys for row in ahead.pop(key)]
        return self._rows(await self._statements.with_gates("parked", list(keys), limit))

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if kind == GATE and all(key in self._gates for key in wanted):
            return {key: gate for key in wanted if (gate := self._gates[key]) is not None}
        found = await self._statements.fetch(_DOCUMENTS, kind, wanted)
        return {key: Document(kind, key, data, due) for key, data, due in found}

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        ahead = self._ahead
        if ahead is not None:
            if query.kind == PAUSED_QUEUE:
                return [Document(PAUSED_QUEUE, key, b"") for key in sorted(ahead.wanted.paused)]
            if query == DocumentQuery(kind=GATE, due_by=self.now, limit=DUE_GATES):
                return ahead.due_gates
        if query.due_by is None:
            bounds: tuple[Any, ...] = (query.after, query.prefix, query.prefix + _AFTER_ALL)
        else:
            bounds = (query.due_after, query.due_by)
        sql = _FIND_BY_KEY if query.due_by is None else _FIND_DUE
        found = await self._statements.fetch(sql, query.kind, *bounds, query.limit)
        return [Document(*line) for line in found]

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        if _is_enqueue(changes):
            await enqueue(self._statements, self.now, changes)
            return frozenset()
        free = [row for row in changes.claimed if not row.gates]
        claimed = await self._write(changes, free)
        self._note_due(changes)
        missed = frozenset(row.id for row in free).difference(claimed)
        self.claimed = len(changes.claimed) - len(missed)
        return missed

    def _note_due(self, changes: Changes) -> None:
        """Note when the first gate is due under which tasks may be parked."""
        for change in changes.documents:
            if change.kind == GATE and change.due is not None and change.after is not None:
                state = decode_gate(change.after)
                if state is not None and state.has_parked:
                    self.next_due = min(change.due, self.next_due or change.due)

    async def _write(self, changes: Changes, free: list[Row]) -> list[str]:
        """Returns the ids of the free rows that were claimed."""
        parameters = self._parameters(changes, free)
        try:
            return await self._call_write(parameters)
        except ReplyLost:
            if not changes.claimed:
                if _is_repeatable(changes):
                    raise PerhapsWritten from None
                raise
        # The name of the claim shows whether the call was made. Earlier steps may have the same name.
        ids = [row.id for row in changes.claimed]
        found = await self._statements.fetch(_CLAIMED, self._owner, self._claim_id, ids)
        return [task_id for (task_id,) in found] or await self._call_write(parameters)

    async def _call_write(self, parameters: tuple[Any, ...]) -> list[str]:
        ((claimed,),) = await self._statements.call_once("write", *parameters)
        return list(claimed)

    def _parameters(self, changes: Changes, free: list[Row]) -> tuple[Any, ...]:
        tokens = self._tokens
        ended = changes.ended
        parked = {row.id: row.parked for row in changes.updated if row.id in changes.moved}
        updated = [row for row in changes.updated if row.id not in changes.moved]
        changed = {row.id for row in updated}.union(row.id for row in changes.checked)
        checked = changed.union(each.row.id for each in ended).difference(tokens)
        held = sorted(changed.intersection(tokens))
        moved = sorted(parked)
        return (
            self._owner,
            self.now,
            self._read_as(checked),
            (encoding.id_array(held), [tokens[task_id] for task_id in held]),
            self._read_as(row.id for row in free),
            self._read_as(row.id for row in changes.claimed if row.gates),
            self._claim_id,
            (*self._read_as(moved), [parked[task_id] for task_id in moved]),
            [
                encoding.task(row, body=row.id in changes.rewritten)
                for row in (*updated, *changes.inserted)
            ],
            encoding.endings(
                ended, [self._owner if each.row.id in tokens else "" for each in ended]
            ),
            encoding.new_tasks(changes.inserted),
            changes.bound,
            encoding.document_changes(changes.documents),
            list(changes.deleted_finished),
            changes.finished_before,
            list(changes.deleted_dead),
        )

    def _read_as(self, ids: Iterable[str]) -> tuple[list[str], list[int]]:
        """These ids and the versions that were read, as a value of the SQL type `read_tasks`.

        In id order, so that two sections that change the same rows do not wait for each other.
        """
        ordered = sorted(ids)
        versions = [self._lines[task_id][_VERSION] for task_id in ordered]
        return encoding.id_array(ordered), encoding.same(versions)


def _gate(line: Any) -> Document:
    return Document(GATE, line["id"], line["rest"], line["due"])


def _is_enqueue(changes: Changes) -> bool:
    inserted, bound, documents = changes.inserted, changes.bound, changes.documents
    return bool(inserted) and changes == Changes(
        inserted=inserted, bound=bound, documents=documents
    )


def _is_repeatable(changes: Changes) -> bool:
    """Whether a section that writes this twice does the same as one that writes it once."""
    return not (
        changes.inserted
        or changes.deleted_finished
        or changes.deleted_dead
        or any(each.row.settled == 0 for each in changes.ended)
        or any(change.kind == SCHEDULE for change in changes.documents)
    )
