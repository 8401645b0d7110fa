"""Section: one read-modify-write without a transaction.

Each read is one statement. The write is one call of an SQL function, which compares the versions of the
rows that it changes and the documents that were read, and writes everything or nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import LeaseLost, QueueFull
from omniq.models import DeadLetter
from omniq.serialization import internal_decoder
from omniq.storage.backend import (
    Changes,
    Document,
    DocumentQuery,
    Moved,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.claim import PAUSED_QUEUE
from omniq.storage.engine import SCHEDULE
from omniq.storage.gate_states import DUE_GATES
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import ReplyLost, WriteRefused
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.store_clock import given_time, observe
from omniq.storage.types import Claim, Holder

Fetch = Callable[..., Awaitable[list[Any]]]
"""Runs a statement with its parameters, and returns all rows.

With `is_repeatable=False`, it raises `ReplyLost` when it is not known whether the statement was run."""

_FIRST = (-(2**63) + 1, -(2**63), -1)
_SEQ, _GATE_KEYS, _VERSION = 1, 21, 22
"""Positions of columns in what is read: see the SQL type `task`."""

_GATE, _DUE_GATE, _PAUSED = -1, -3, -4
"""The `seq` of lines that are no tasks: see `with_gates.sql` and the SQL function `begin_claim`."""

_AFTER_ALL = "\U0010ffff"

_DOCUMENTS = "SELECT key, data, due FROM {schema}.documents WHERE kind = $1 AND key = ANY ($2)"
_FIND = "SELECT kind, key, data, due FROM {schema}.documents WHERE kind = $1 AND "
_FIND_BY_KEY = _FIND + "key > $2 AND key >= $3 AND key < $4 ORDER BY key LIMIT $5"
_FIND_DUE = _FIND + "due > $2 AND due <= $3 ORDER BY due LIMIT $4"

_decode_letter = internal_decoder(DeadLetter)


class _ReadAhead(msgspec.Struct):
    """What the first statement of a claim has read: the first `limit` rows that are `wanted`.

    `rows` is None after they were asked for, and if more tasks are due than one statement moves.
    """

    wanted: Wanted
    limit: int
    due_gates: list[Document]
    rows: list[Row] | None


class PostgresSection(Section):
    """A section, whose statements `fetch` runs. `holder` may claim in it, with the name `claim_id`."""

    def __init__(
        self,
        fetch: Fetch,
        names: SchemaNames,
        clock: Clock,
        *,
        holder: Holder | None = None,
        claim_id: str = "",
    ) -> None:
        self.now = clock.micros()
        self._fetch = fetch
        self._names = names
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
        sent_at = self._clock.boot_micros()
        facts, *lines = await self._fetch(
            self._names.select("begin_claim", 5, "with_gates"),
            self._owner,
            given_time(self._clock),
            encoding.claim(claim, name="", beat=beat),
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
        wanted = Wanted(
            due_by=self.now if claim.now is None else claim.now,
            queues=claim.queues,
            paused=frozenset(line["id"] for line in lines if line[_SEQ] == _PAUSED),
            runnable=claim.runnable,
            suspects=not facts["crashes"],
        )
        is_complete = all(line[_SEQ] is not None for line in lines)
        due_gates = [_gate(line) for line in lines if line[_SEQ] == _DUE_GATE]
        rows = self._rows(line for line in lines if line[_SEQ] not in (None, _DUE_GATE, _PAUSED))
        self._ahead = _ReadAhead(wanted, claim.limit, due_gates, rows if is_complete else None)

    # Reading

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if not ids:
            return {}
        lines = await self._fetch(self._names.file("load"), list(ids), self.now, bodies)
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
                records[line["id"]] = Record(
                    encoding.row_from(line),
                    None if known is None else known.finished,
                    _decode_letter(letter),
                )
        return records

    def _rows(self, lines: Iterable[Any]) -> list[Row]:
        """The rows of these lines; also notes their versions, and the gates that are among them."""
        rows: list[Row] = []
        for line in lines:
            if line[_SEQ] == _GATE:
                self._gates[line["id"]] = _gate(line)
                continue
            row = encoding.row_from(line)
            # If it is read twice, the first version is the one that the changes are based on.
            self._lines.setdefault(row.id, line)
            for key in line[_GATE_KEYS] or ():
                self._gates.setdefault(key, None)
            rows.append(row)
        return rows

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        if only_suspects and self._ahead is not None and self._ahead.wanted.suspects:
            return []
        return self._rows(await self._fetch(self._names.file("held"), list(owners), only_suspects))

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        ahead = self._ahead
        if after is None and ahead is not None and ahead.rows is not None:
            rows, ahead.rows = ahead.rows, None
            if wanted == ahead.wanted and limit <= ahead.limit:
                return rows[:limit]
        rank, turn, seq = _FIRST if after is None else after
        sql = self._names.select("candidates", 8, "with_gates", first="text[]")
        while True:
            lines = await self._fetch(
                sql,
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
        sql = self._names.select("parked", 2, "with_gates", first="text[]")
        return self._rows(await self._fetch(sql, list(keys), limit))

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if kind == GATE and all(key in self._gates for key in wanted):
            return {key: gate for key in wanted if (gate := self._gates[key]) is not None}
        found = await self._fetch(self._names(_DOCUMENTS), kind, wanted)
        return {key: Document(kind, key, data, due) for key, data, due in found}

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        ahead = self._ahead
        if ahead is not None and query.kind == PAUSED_QUEUE:
            return [Document(PAUSED_QUEUE, key, b"") for key in sorted(ahead.wanted.paused)]
        if query.due_by is None:
            high = query.prefix + _AFTER_ALL
            found = await self._fetch(
                self._names(_FIND_BY_KEY), query.kind, query.after, query.prefix, high, query.limit
            )
        elif ahead is not None and query == DocumentQuery(
            kind=GATE, due_by=self.now, limit=DUE_GATES
        ):
            return ahead.due_gates
        else:
            sql = self._names(_FIND_DUE)
            due = (query.due_after, query.due_by)
            found = await self._fetch(sql, query.kind, *due, query.limit)
        return [Document(*line) for line in found]

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        try:
            if _is_enqueue(changes):
                await self._enqueue(changes)
                return frozenset()
            free = [row for row in changes.claimed if not row.gates]
            claimed = await self._write(changes, free)
            missed = frozenset(row.id for row in free).difference(claimed)
            self.claimed = len(changes.claimed) - len(missed)
            return missed
        except WriteRefused as refused:
            match refused.sqlstate:
                case "OQ002":
                    raise LeaseLost(self._owner) from None
                case "OQ003":
                    raise QueueFull(changes.bound or 0) from None
                case _:
                    raise Moved from None

    async def _enqueue(self, changes: Changes) -> None:
        try:
            if len(changes.inserted) == 1 and changes.bound is None and not changes.documents:
                sql = self._names.select("enqueue_one", 2, first="bigint")
                parameters: tuple[Any, ...] = (self.now, encoding.new_task(changes.inserted[0]))
            else:
                sql = self._names.select("enqueue", 6, first="bigint")
                parameters = enqueue_parameters(self.now, changes)
            await self._fetch(sql, *parameters, is_repeatable=False)
        except ReplyLost:
            # Records show what was enqueued already. A task without one may have run and be gone.
            if all(row.result_ttl > 0 for row in changes.inserted):
                raise Moved from None
            raise

    async def _write(self, changes: Changes, free: list[Row]) -> list[str]:
        """Returns the ids of the free rows that were claimed."""
        parameters = self._parameters(changes, free)
        try:
            return await self._call_write(parameters)
        except ReplyLost:
            if not changes.claimed:
                # What was written already is recognized when it is read again.
                if _is_repeatable(changes):
                    raise Moved from None
                raise
        # The name of the claim shows whether the call was made. Earlier steps may have the same name.
        sql = (
            "SELECT id FROM {schema}.live WHERE place = 4 AND owner = $1 AND claim_id = $2 "
            "AND id = ANY ($3)"
        )
        ids = [row.id for row in changes.claimed]
        found = await self._fetch(self._names(sql), self._owner, self._claim_id, ids)
        return [task_id for (task_id,) in found] or await self._call_write(parameters)

    def _parameters(self, changes: Changes, free: list[Row]) -> tuple[Any, ...]:
        tokens = self._tokens
        ended = changes.ended
        tasks, moved = self._split(changes.updated)
        changed = {task[0] for task in tasks}.union(row.id for row in changes.checked)
        checked = changed.union(each.row.id for each in ended).difference(tokens)
        held = sorted(changed.intersection(tokens))
        return (
            self._owner,
            self.now,
            self._read_as(checked),
            (held, [tokens[task_id] for task_id in held]),
            self._read_as(row.id for row in free),
            self._read_as(row.id for row in changes.claimed if row.gates),
            self._claim_id,
            moved,
            tasks + [encoding.task(row) for row in changes.inserted],
            encoding.endings(
                ended, [self._owner if each.row.id in tokens else "" for each in ended]
            ),
            encoding.new_tasks(changes.inserted),
            changes.bound,
            encoding.document_changes(changes.documents),
            list(changes.deleted_finished),
            changes.finished_before,
            list(changes.deleted_dead),
            _wakes(changes),
        )

    def _split(self, rows: list[Row]) -> tuple[list[tuple[Any, ...]], tuple[list[Any], ...]]:
        """Updated rows as values of the SQL types `task` and, if only `parked` changes, `moved_tasks`."""
        tasks: list[tuple[Any, ...]] = []
        moved: dict[str, str | None] = {}
        for row in rows:
            task, line = encoding.task(row), self._lines.get(row.id)
            if line is None or row.id in self._tokens or not encoding.is_move(task, line):
                tasks.append(task)
            else:
                moved[row.id] = row.parked
        ids, versions = self._read_as(moved)
        return tasks, (ids, versions, [moved[task_id] for task_id in ids])

    def _read_as(self, ids: Iterable[str]) -> tuple[list[str], list[int]]:
        """These ids and the versions that were read, as a value of the SQL type `read_tasks`.

        In id order, so that two sections that change the same rows do not wait for each other.
        """
        ordered = sorted(ids)
        return ordered, [self._lines[task_id][_VERSION] for task_id in ordered]

    async def _call_write(self, parameters: tuple[Any, ...]) -> list[str]:
        sql = self._names.select("write", len(parameters))
        ((claimed,),) = await self._fetch(sql, *parameters, is_repeatable=False)
        return list(claimed)


def enqueue_parameters(now: int, changes: Changes, *, is_certain: bool = False) -> tuple[Any, ...]:
    """The parameters of the SQL function `enqueue`."""
    rows = changes.inserted
    return (
        now,
        encoding.new_tasks(rows),
        min([row.visible for row in rows]),
        changes.bound,
        encoding.document_changes(changes.documents) if changes.documents else [],
        is_certain,
    )


def _gate(line: Any) -> Document:
    return Document(GATE, line["id"], line["rest"], line["due"])


def _is_enqueue(changes: Changes) -> bool:
    return bool(changes.inserted) and not (
        changes.claimed
        or changes.updated
        or changes.ended
        or changes.checked
        or changes.deleted_finished
        or changes.deleted_dead
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


def _wakes(changes: Changes) -> bool:
    return any(row.owner is None and row.parked is None for row in changes.updated) or any(
        change.kind == PAUSED_QUEUE and change.after is None for change in changes.documents
    )
