"""Record: the rule path, which applies the rules in Python inside one transaction.

The rules are those of `row_rules` and `gate_rules`. Outcomes that need no rule take the fast path
(`record_and_claim`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from omniq import gate_rules
from omniq.gate_rules import GateState
from omniq.models import DeadLetter
from omniq.outcomes import Outcome
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage import row_rules
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import Connection
from omniq.storage.postgres.encoding import StoredRow
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.row_rules import Finish, FinishedRow, Row, Settled
from omniq.storage.types import Entry

EncodeFinish = Callable[[Finish, bytes | None], bytes]

NOTIFY_WORK = "SELECT {schema}.tell_of_work(0) WHERE {schema}.is_awaited('work')"
"""Notifies the storages that wait for work; sends nothing when none does."""

decode_gate = internal_decoder(GateState)


class Gates:
    """The shared state of gates. The caller's transaction holds the lock 'gates'."""

    def __init__(self, db: Connection, names: SchemaNames) -> None:
        self._db = db
        self._names = names
        self._states: dict[str, GateState] = {}
        self._read: dict[str, bytes] = {}

    async def load(self, keys: Iterable[str]) -> None:
        """Read the states of these gates."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._states]
        if not missing:
            return
        sql = self._names("SELECT key, state FROM {schema}.gates WHERE key = ANY ($1)")
        self._read.update(dict(await self._db.fetch(sql, missing)))
        for key in missing:
            data = self._read.setdefault(key, b"")
            self._states[key] = decode_gate(data) if data else GateState()

    async def load_for(self, rows: Iterable[Row]) -> None:
        """Read the states of these rows' gates."""
        await self.load(gate.key for row in rows for gate in row.gates)

    def __getitem__(self, key: str) -> GateState:
        return self._states[key]

    def of(self, row: Row) -> dict[str, GateState]:
        """The states of a row's gates."""
        return {gate.key: self._states[gate.key] for gate in row.gates}

    async def flush(self) -> None:
        """Write the states that have changed."""
        changed = []
        for key, state in self._states.items():
            data = encode_internal(state)
            if data != self._read[key]:
                changed.append((key, state.wake_at, data))
                self._read[key] = data
        if changed:
            sql = self._names(
                "INSERT INTO {schema}.gates SELECT * FROM unnest($1::text[], $2::bigint[], "
                "$3::bytea[]) ON CONFLICT (key) DO UPDATE "
                "SET wake_at = excluded.wake_at, state = excluded.state"
            )
            await self._db.execute(sql, *encoding.to_columns(changed, 3))


class _Ended(msgspec.Struct, frozen=True):
    finished: FinishedRow
    letter: DeadLetter | None

    @property
    def has_record(self) -> bool:
        return self.letter is not None or self.finished.row.result_ttl > 0


class Recorder:
    """Changes to rows inside one transaction, collected in memory and written by `flush`."""

    def __init__(
        self, db: Connection, names: SchemaNames, now: int, encode_finish: EncodeFinish
    ) -> None:
        self.db = db
        self.now = now
        self.names = names
        self.gates = Gates(db, names)
        self.claim_id = ""
        self._encode_finish = encode_finish
        self._is_resent = False
        self._live: dict[str, StoredRow] = {}
        self._changed: dict[str, StoredRow] = {}
        self._ended: dict[str, _Ended] = {}
        self._newest: dict[str, bytes] = {}
        self._claimed: set[str] = set()

    # Reading

    async def load(self, task_ids: Iterable[str]) -> None:
        """Read and lock the live rows with these ids."""
        sql = self.names(
            f"SELECT {encoding.LIVE_COLUMNS_WITHOUT_BODY} FROM {{schema}}.live "
            "WHERE id = ANY ($1) ORDER BY id FOR UPDATE"
        )
        for record in await self.db.fetch(sql, list(task_ids)):
            self.track(encoding.stored_row(record))

    async def held_by(self, owner: str) -> list[Row]:
        """Read and lock all rows that an owner holds."""
        sql = self.names(
            f"SELECT {encoding.LIVE_COLUMNS_WITHOUT_BODY} FROM {{schema}}.live "
            "WHERE place = 4 AND owner = $1 ORDER BY id FOR UPDATE"
        )
        held = [encoding.stored_row(record) for record in await self.db.fetch(sql, owner)]
        for stored in held:
            self.track(stored)
        rows = [stored.row for stored in held]
        await self.gates.load_for(rows)
        return rows

    def track(self, stored: StoredRow) -> None:
        """Add a row that this transaction has locked, so that it can be changed."""
        self._live[stored.row.id] = stored

    def live(self, task_id: str) -> Row | None:
        """Return a row that was loaded and has not ended, or None."""
        stored = self._live.get(task_id)
        return None if stored is None else stored.row

    # Recording outcomes

    async def record(
        self, owner: str, entries: Sequence[Entry], *, is_resent: bool = False
    ) -> list[bool]:
        """Apply the outcomes whose claims are current; for each, whether it is recorded.

        With `is_resent` the entries are sent again because a reply was lost. The first call may
        have recorded an outcome that released its task, and claimed the same task again.
        """
        self._is_resent = is_resent
        await self.load({entry.outcome.task_id for entry in entries})
        await self.gates.load_for(stored.row for stored in self._live.values())
        missing = [e.outcome.task_id for e in entries if e.outcome.task_id not in self._live]
        ended = await self._read_ended(missing) if missing else {}
        recorded = [self._record(owner, entry, ended) for entry in entries]
        await self.flush()
        return recorded

    async def _read_ended(self, task_ids: list[str]) -> dict[str, Row]:
        """Read the records of tasks that are not live; a dead letter replaces a finished row."""
        sql = self.names(
            f"SELECT {encoding.ENDED_COLUMNS} FROM {{schema}}.finished "
            "WHERE id = ANY ($1) AND expires_at > $2 "
            f"UNION ALL SELECT {encoding.ENDED_COLUMNS} FROM {{schema}}.dead WHERE id = ANY ($1)"
        )
        found = await self.db.fetch(sql, task_ids, self.now)
        return {stored.row.id: stored.row for stored in map(encoding.stored_row, found)}

    def _record(self, owner: str, entry: Entry, ended: dict[str, Row]) -> bool:
        outcome = entry.outcome
        row = self.live(outcome.task_id)
        if row is None:
            return self._was_recorded(outcome, ended)
        if not row_rules.is_current(row, outcome, owner):
            is_settled = self._is_resent and row.settled == outcome.token
            return is_settled or row_rules.was_recorded(row, outcome)
        token = row.token
        self.apply(row, token, row_rules.settle(row, outcome, self.now), entry.result)
        return True

    def _was_recorded(self, outcome: Outcome, ended: dict[str, Row]) -> bool:
        ended_here = self._ended.get(outcome.task_id)
        if ended_here is not None:
            row = ended_here.finished.row
            return ended_here.has_record and row_rules.was_recorded(row, outcome)
        found = ended.get(outcome.task_id)
        return found is not None and row_rules.was_recorded(found, outcome)

    # Changing rows

    def apply(self, row: Row, token: int, settled: Settled, result: bytes | None) -> None:
        """Apply the effects of an outcome: leave the gates, then change or end the row."""
        for gate in row.gates:
            state = self.gates[gate.key]
            gate_rules.leave(gate, state, row.id, token, settled.effect, self.now, settled.reason)
        if settled.result is not None and result is not None:
            self._newest[row.id] = result
            self._live[row.id] = StoredRow(row, True)
        if settled.finish is not None:
            self.finish(row, settled.finish, result)
        else:
            self.change(row)

    def change(self, row: Row) -> None:
        """Have `flush` write the row as it is then."""
        self._changed[row.id] = self._live[row.id]

    def claim(self, row: Row, owner: str) -> None:
        """Claim a row for the owner."""
        row_rules.claim(row, owner, self.now)
        self._claimed.add(row.id)
        self.change(row)

    def finish(self, row: Row, finish: Finish, result: bytes | None = None) -> None:
        """End a loaded row."""
        del self._live[row.id]
        self._changed.pop(row.id, None)
        self._newest.pop(row.id, None)
        encoded = self._encode_finish(finish, result)
        finished = row_rules.finished_row(row, finish, encoded, self.now)
        self._ended[row.id] = _Ended(finished, finish.dead)

    async def flush(self) -> None:
        """Write all changes."""
        if self._ended:
            lines = [
                encoding.finish_line(each.finished, each.letter) for each in self._ended.values()
            ]
            await self._call("finish", 10, lines)
            self._ended.clear()
        if self._newest:
            await self._write_newest()
        if self._changed:
            lines = [
                encoding.save_line(
                    stored.row, stored.attached, self.claim_id if task_id in self._claimed else None
                )
                for task_id, stored in self._changed.items()
            ]
            await self._call("save", 17, lines)
            self._changed.clear()
        await self.gates.flush()

    async def notify_work(self) -> None:
        """Notify the storages that wait for work, when this transaction commits."""
        await self.db.execute(self.names(NOTIFY_WORK))

    async def _call(self, function: str, width: int, lines: Sequence[tuple[object, ...]]) -> None:
        placeholders = ", ".join(f"${number}" for number in range(1, width + 2))
        sql = self.names(f"SELECT {{schema}}.{function}({placeholders})")
        await self.db.execute(sql, self.now, *encoding.to_columns(lines, width))

    async def _write_newest(self) -> None:
        """Store the newest results of repeating tasks; their checkpoints and progress are deleted."""
        ids = list(self._newest)
        for table in ("checkpoints", "progress"):
            await self.db.execute(
                self.names(f"DELETE FROM {{schema}}.{table} WHERE id = ANY ($1)"), ids
            )
        sql = self.names(
            "INSERT INTO {schema}.newest SELECT * FROM unnest($1::text[], $2::bytea[]) "
            "ON CONFLICT (id) DO UPDATE SET result = excluded.result"
        )
        await self.db.execute(sql, ids, list(self._newest.values()))
        self._newest.clear()
