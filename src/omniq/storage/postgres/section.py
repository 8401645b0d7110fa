"""Section: one read-modify-write without a transaction.

Each read is one statement. The write is one call of an SQL function, which compares the versions of the
rows that it changes and the documents that were read, and writes everything or nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

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
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import ReplyLost, WriteRefused
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import FinishedRow, Row

Fetch = Callable[..., Awaitable[list[Any]]]
"""Runs a statement with its parameters, and returns all rows.

With `is_repeatable=False`, it raises `ReplyLost` when it is not known whether the statement was run."""

_FIRST = (-(2**63) + 1, -(2**63), -1)
_AFTER_ALL = "\U0010ffff"

# The states of the gates of the rows that were found are returned with them, as rows with the `seq` -1.
_GATES = (
    "SELECT key, -1, NULL, NULL, NULL, NULL, due, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, "
    "NULL, NULL, NULL, NULL, data, NULL, NULL, NULL{more} FROM {schema}.documents "
    f"WHERE kind = '{GATE}' AND key = ANY (array(SELECT unnest(gates) FROM found))"
)
_FOUND_AND_GATES = (
    "WITH found AS MATERIALIZED ({query}) SELECT * FROM found UNION ALL "
    + _GATES.replace("{more}", "")
)
_LOAD = (
    "WITH found AS MATERIALIZED (SELECT {live}, gates, xmin FROM {schema}.live WHERE id = ANY ($1)) "
    "SELECT *, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea FROM found UNION ALL "
    "SELECT {ended}, NULL, NULL, finished_at, expires_at, result, NULL FROM {schema}.finished "
    "WHERE id = ANY ($1) AND expires_at > $2 UNION ALL "
    "SELECT {ended}, NULL, NULL, NULL, NULL, NULL, letter FROM {schema}.dead WHERE id = ANY ($1) "
    "UNION ALL " + _GATES.replace("{more}", ", NULL, NULL, NULL, NULL")
)
_LOAD_WITHOUT_BODIES = _LOAD.replace("{live}", encoding.LIVE_COLUMNS_WITHOUT_BODY).replace(
    "{ended}", encoding.ENDED_COLUMNS_WITHOUT_BODY
)
_LOAD_WITH_BODIES = _LOAD.replace("{live}", encoding.LIVE_COLUMNS).replace(
    "{ended}", encoding.ENDED_COLUMNS
)
_HELD = _FOUND_AND_GATES.replace(
    "{query}",
    f"SELECT {encoding.LIVE_COLUMNS_WITHOUT_BODY}, gates, xmin FROM {{schema}}.live "
    "WHERE place = 4 AND owner = ANY ($1) AND (crashes > 0 OR NOT $2)",
)
_PARKED = _FOUND_AND_GATES.replace("{query}", "SELECT * FROM {schema}.parked($1, $2)")
_BEGIN_CLAIM = (
    "SELECT now AS at, EXISTS (SELECT FROM {schema}.leases WHERE owner = $1 AND NOT fenced) "
    "AS has_lease, EXISTS (SELECT FROM {schema}.live WHERE place = 4 AND crashes > 0 "
    "AND owner = $1) AS holds_suspect, EXISTS (SELECT FROM {schema}.documents "
    f"WHERE kind = '{GATE}' AND due <= now) AS has_due_gate, array(SELECT key "
    f"FROM {{schema}}.documents WHERE kind = '{PAUSED_QUEUE}' ORDER BY key) AS paused "
    "FROM {schema}.micros($2) AS now"
)
_DOCUMENTS = "SELECT key, data, due FROM {schema}.documents WHERE kind = $1 AND key = ANY ($2)"
_FIND = "SELECT kind, key, data, due FROM {schema}.documents WHERE kind = $1 AND "
_FIND_BY_KEY = _FIND + "key > $2 AND key >= $3 AND key < $4 ORDER BY key LIMIT $5"
_FIND_DUE = _FIND + "due <= $2 ORDER BY due LIMIT $3"

_decode_letter = internal_decoder(DeadLetter)


class PostgresSection(Section):
    """A section, whose statements `fetch` runs. `owner` claims in it, with the name `claim_id`."""

    def __init__(
        self, fetch: Fetch, names: SchemaNames, now: int, *, owner: str = "", claim_id: str = ""
    ) -> None:
        self.now = now
        self._fetch = fetch
        self._names = names
        self._owner = owner
        self._claim_id = claim_id
        self._versions: dict[str, int] = {}
        self._gates: dict[str, Document | None] = {}
        self._claim_facts: Any = None

    async def begin_claim(self, given_now: int | None) -> None:
        """Read what every claim asks for; `LeaseLost` if the owner has no lease."""
        (facts,) = await self._fetch(self._names(_BEGIN_CLAIM), self._owner, given_now)
        if not facts["has_lease"]:
            raise LeaseLost(self._owner)
        self.now = facts["at"]
        self._claim_facts = facts

    # Reading

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if not ids:
            return {}
        sql = self._names(_LOAD_WITH_BODIES if bodies else _LOAD_WITHOUT_BODIES)
        lines = await self._fetch(sql, list(ids), self.now)
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
            if line["seq"] == -1:
                self._gates[line["id"]] = Document(GATE, line["id"], line["rest"], line["due"])
                continue
            row = encoding.row_from(line)
            # If it is read twice, the first version is the one that the changes are based on.
            self._versions.setdefault(row.id, line[22])
            for key in line["gates"] or ():
                self._gates.setdefault(key, None)
            rows.append(row)
        return rows

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        facts = self._claim_facts
        if only_suspects and facts is not None and not facts["holds_suspect"]:
            return []
        return self._rows(await self._fetch(self._names(_HELD), list(owners), only_suspects))

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        rank, turn, seq = _FIRST if after is None else after
        sql = self._names.select("candidates", 12, _FOUND_AND_GATES)
        while True:
            lines = await self._fetch(
                sql,
                self._owner,
                None if wanted.queues is None else list(wanted.queues),
                sorted(wanted.paused),
                *encoding.function_ranges(wanted.runnable),
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
        return self._rows(await self._fetch(self._names(_PARKED), list(keys), limit))

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if kind == GATE and all(key in self._gates for key in wanted):
            return {key: gate for key in wanted if (gate := self._gates[key]) is not None}
        found = await self._fetch(self._names(_DOCUMENTS), kind, wanted)
        return {key: Document(kind, key, data, due) for key, data, due in found}

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        facts = self._claim_facts
        if facts is not None and query.kind == PAUSED_QUEUE:
            return [Document(PAUSED_QUEUE, key, b"") for key in facts["paused"]]
        if query.due_by is None:
            high = query.prefix + _AFTER_ALL
            found = await self._fetch(
                self._names(_FIND_BY_KEY), query.kind, query.after, query.prefix, high, query.limit
            )
        elif facts is not None and query.kind == GATE and not facts["has_due_gate"]:
            return []
        else:
            sql = self._names(_FIND_DUE)
            found = await self._fetch(sql, query.kind, query.due_by, query.limit)
        return [Document(*line) for line in found]

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        try:
            if _is_enqueue(changes):
                await self._enqueue(changes)
                return frozenset()
            free = [row for row in changes.claimed if not row.gates]
            claimed = await self._write(changes, free)
            return frozenset(row.id for row in free).difference(claimed)
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
            await self._call("enqueue", *enqueue_parameters(self.now, changes))
        except ReplyLost:
            # Records show what was enqueued already. A task without one may have run and be gone.
            if all(row.result_ttl > 0 for row in changes.inserted):
                raise Moved from None
            raise

    async def _write(self, changes: Changes, free: list[Row]) -> list[str]:
        """Returns the ids of the free rows that were claimed."""
        parameters = self._parameters(changes, free)
        try:
            return list(await self._call("write", *parameters))
        except ReplyLost:
            if not changes.claimed:
                # What was written already is recognized when it is read again.
                if _is_repeatable(changes):
                    raise Moved from None
                raise
        # The name of the claim shows whether the call was made.
        sql = "SELECT id FROM {schema}.live WHERE place = 4 AND owner = $1 AND claim_id = $2"
        found = await self._fetch(self._names(sql), self._owner, self._claim_id)
        if found:
            return [task_id for (task_id,) in found]
        return list(await self._call("write", *parameters))

    def _parameters(self, changes: Changes, free: list[Row]) -> tuple[Any, ...]:
        gated = [row.id for row in changes.claimed if row.gates]
        changed = (*changes.updated, *(each.row for each in changes.ended), *changes.checked)
        # In id order, so that two sections that change the same rows do not wait for each other.
        checked = sorted({row.id for row in changed}.union(gated))
        versions, free_ids = self._versions, sorted(row.id for row in free)
        return (
            self._owner if changes.claimed else None,
            self.now,
            checked,
            [versions[task_id] for task_id in checked],
            free_ids,
            [versions[task_id] for task_id in free_ids],
            gated,
            self._claim_id,
            [encoding.task(row) for row in changes.updated],
            [encoding.ending(each) for each in changes.ended],
            [encoding.task(row, body=True) for row in changes.inserted],
            changes.bound,
            encoding.document_changes(changes.documents),
            list(changes.deleted_finished),
            list(changes.deleted_dead),
            _wakes(changes),
        )

    async def _call(self, function: str, *parameters: Any) -> Any:
        sql = self._names.select(function, len(parameters))
        (line,) = await self._fetch(sql, *parameters, is_repeatable=False)
        return line[0]


def enqueue_parameters(now: int, changes: Changes, *, is_certain: bool = False) -> tuple[Any, ...]:
    """The parameters of the SQL function `enqueue`."""
    rows = changes.inserted
    return (
        None,
        now,
        [encoding.new_task(row) for row in rows],
        [row.id for row in rows],
        min(row.visible for row in rows),
        changes.bound,
        encoding.document_changes(changes.documents) if changes.documents else [],
        is_certain,
    )


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
