"""Record: applies outcomes and other changes to rows, inside one transaction.

The rules are those of `row_rules` and `gate_rules`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from omniq import gate_rules
from omniq.clock import to_micros
from omniq.gate_rules import GateState
from omniq.models import DeadLetter
from omniq.outcomes import Outcome
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage import row_rules
from omniq.storage.row_rules import Finish, FinishedRow, Row, Settled
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import Connection, statement
from omniq.storage.sqlite.tables import StoredRow
from omniq.storage.types import Entry

EncodeFinish = Callable[[Finish, bytes | None], bytes]

_decode_gate = internal_decoder(GateState)


class Gates:
    """The shared state of gates, read at the first use and written by `flush` if it has changed."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._states: dict[str, GateState] = {}
        self._read: dict[str, bytes] = {}

    def __getitem__(self, key: str) -> GateState:
        if key not in self._states:
            found = self._db.execute(
                "SELECT state FROM omniq_gates WHERE key = ?", (key,)
            ).fetchone()
            self._read[key] = found[0] if found is not None else b""
            self._states[key] = _decode_gate(found[0]) if found is not None else GateState()
        return self._states[key]

    def of(self, row: Row) -> dict[str, GateState]:
        """The states of a row's gates."""
        return {gate.key: self[gate.key] for gate in row.gates}

    def flush(self) -> None:
        """Write the states that have changed."""
        for key, state in self._states.items():
            data = encode_internal(state)
            if data != self._read[key]:
                self._db.execute("INSERT OR REPLACE INTO omniq_gates VALUES (?, ?)", (key, data))
                self._read[key] = data


def read_gates(db: Connection) -> dict[str, GateState]:
    """The state of every gate that was ever used."""
    return {key: _decode_gate(data) for key, data in db.execute("SELECT * FROM omniq_gates")}


class _Ended(msgspec.Struct, frozen=True):
    finished: FinishedRow
    attached: bool
    letter: DeadLetter | None

    @property
    def has_record(self) -> bool:
        return self.letter is not None or self.finished.row.result_ttl > 0


class Recorder:
    """Changes to rows inside one transaction, collected in memory and written by `flush`."""

    def __init__(self, db: Connection, now: int, encode_finish: EncodeFinish) -> None:
        self.db = db
        self.now = now
        self.gates = Gates(db)
        self._encode_finish = encode_finish
        self._live: dict[str, StoredRow] = {}
        self._changed: dict[str, StoredRow] = {}
        self._ended: dict[str, _Ended] = {}
        self._newest: dict[int, bytes] = {}

    # Recording outcomes

    def record(self, owner: str, entries: Sequence[Entry], known: Mapping[str, Row]) -> list[bool]:
        """Apply the outcomes whose claims are current; for each, whether it is recorded.

        `known` are rows as this owner has claimed them. While a claim is current, other calls
        change only the cancel flag and the attached flag of its row, so only these are read again.
        """
        if known:
            self._load_known(owner, known)
        unknown = {entry.outcome.task_id for entry in entries} - self._live.keys()
        if unknown:
            self.load(unknown)
        return [self._record(owner, entry) for entry in entries]

    def _load_known(self, owner: str, known: Mapping[str, Row]) -> None:
        by_seq = {row.seq: row for row in known.values()}
        parameters = {"owner": owner, "seqs": tables.json_text(list(by_seq))}
        for seq, token, is_cancelled, is_attached in tables.read_array(
            self.db, statement("still_held"), parameters
        ):
            if by_seq[seq].token == token:
                # A copy: when this transaction fails, `known` must be unchanged.
                row = copy.copy(by_seq[seq])
                row.cancel_requested = is_cancelled == 1
                self._live[row.id] = StoredRow(row, is_attached == 1)

    def load(self, task_ids: Iterable[str]) -> None:
        """Read the live rows with these ids."""
        ids = tables.json_text(list(task_ids))
        sql = tables.rows_statement("live_by_id", body=False)
        for stored in tables.read_rows(self.db, sql, {"ids": ids}):
            self._live[stored.row.id] = stored

    def held_by(self, owner: str) -> list[Row]:
        """Read all rows that an owner holds."""
        sql = tables.rows_statement("live_by_owner", body=False)
        for stored in tables.read_rows(self.db, sql, {"owner": owner}):
            self._live[stored.row.id] = stored
        return [stored.row for stored in self._live.values() if stored.row.owner == owner]

    def live(self, task_id: str) -> Row | None:
        """Return a row that was loaded and has not ended, or None."""
        stored = self._live.get(task_id)
        return None if stored is None else stored.row

    def _record(self, owner: str, entry: Entry) -> bool:
        outcome = entry.outcome
        row = self.live(outcome.task_id)
        if row is None:
            return self._was_recorded(outcome)
        if not row_rules.is_current(row, outcome, owner):
            return row_rules.was_recorded(row, outcome)
        token = row.token
        self.apply(row, token, row_rules.settle(row, outcome, self.now), entry.result)
        return True

    def _was_recorded(self, outcome: Outcome) -> bool:
        ended = self._ended.get(outcome.task_id)
        if ended is not None:
            row = ended.finished.row
            return ended.has_record and row_rules.was_recorded(row, outcome)
        sql = tables.rows_statement("ended_by_id", body=False)
        found = tables.read_rows(self.db, sql, {"id": outcome.task_id, "now": self.now})
        return bool(found) and row_rules.was_recorded(found[0].row, outcome)

    # Changing rows

    def apply(self, row: Row, token: int, settled: Settled, result: bytes | None) -> None:
        """Apply the effects of an outcome: leave the gates, then change or end the row."""
        for gate in row.gates:
            state = self.gates[gate.key]
            gate_rules.leave(gate, state, row.id, token, settled.effect, self.now, settled.reason)
        if settled.result is not None and result is not None:
            self._newest[row.seq] = result
            self._mark_attached(row)
            self.db.execute("DELETE FROM omniq_checkpoints WHERE id = ?", (row.id,))
            self.db.execute("DELETE FROM omniq_progress WHERE seq = ?", (row.seq,))
        if settled.finish is not None:
            self.finish(row, settled.finish, result)
        else:
            self.change(row)

    def change(self, row: Row) -> None:
        """Have `flush` write the row as it is then."""
        self._changed[row.id] = self._live[row.id]

    def _mark_attached(self, row: Row) -> None:
        self._live[row.id] = StoredRow(row, True)

    def track(self, stored: StoredRow) -> None:
        """Add a row that this transaction has read elsewhere, so that it can be changed."""
        self._live[stored.row.id] = stored

    def finish(self, row: Row, finish: Finish, result: bytes | None = None) -> None:
        """End a loaded row."""
        stored = self._live.pop(row.id)
        self._changed.pop(row.id, None)
        encoded = self._encode_finish(finish, result)
        finished = row_rules.finished_row(row, finish, encoded, self.now)
        self._ended[row.id] = _Ended(finished, stored.attached, finish.dead)

    def flush(self) -> None:
        """Write all changes."""
        if self._ended:
            self._write_ended(list(self._ended.values()))
            self._ended.clear()
        if self._newest:
            self.db.executemany(
                "INSERT OR REPLACE INTO omniq_newest VALUES (?, ?)", self._newest.items()
            )
            self._newest.clear()
        if self._changed:
            tables.save_live(self.db, self._changed.values(), self.now)
            self._changed.clear()
        self.gates.flush()

    def _write_ended(self, ended: list[_Ended]) -> None:
        tables.insert_finished(
            self.db, [each.finished for each in ended if each.finished.row.result_ttl]
        )
        tables.delete(self.db, "omniq_live", (each.finished.row.seq for each in ended))
        for each in ended:
            row = each.finished.row
            if each.letter is not None:
                tables.insert_dead(
                    self.db,
                    row,
                    last_failure=to_micros(each.letter.last_failure),
                    reason=each.letter.failure_reason,
                    letter=encode_internal(each.letter),
                )
            if each.attached:
                self._delete_side_data(row, keeps_checkpoint=each.letter is not None)
        if without_record := [each.finished.row.seq for each in ended if not each.has_record]:
            tables.delete(self.db, "omniq_tasks", without_record)

    def _delete_side_data(self, row: Row, *, keeps_checkpoint: bool) -> None:
        self.db.execute("DELETE FROM omniq_progress WHERE seq = ?", (row.seq,))
        self.db.execute("DELETE FROM omniq_newest WHERE seq = ?", (row.seq,))
        if not keeps_checkpoint:
            self.db.execute("DELETE FROM omniq_checkpoints WHERE id = ?", (row.id,))


class KnownRows:
    """The rows that this storage has claimed and not recorded yet, as they were when claimed."""

    def __init__(self) -> None:
        self._owner = ""
        self._rows: dict[str, Row] = {}

    def of(self, owner: str, entries: list[Entry]) -> dict[str, Row]:
        """The known rows of the tasks in the entries."""
        if owner != self._owner:
            return {}
        ids = (entry.outcome.task_id for entry in entries)
        return {task_id: self._rows[task_id] for task_id in ids if task_id in self._rows}

    def update(self, owner: str, entries: list[Entry], claimed: list[Row]) -> None:
        """Remove the rows that were recorded, and add those that were claimed."""
        if owner != self._owner:
            # The tasks of the former owner have been given back.
            self._owner, self._rows = owner, {}
        for entry in entries:
            self._rows.pop(entry.outcome.task_id, None)
        for row in claimed:
            self._rows[row.id] = row


def held_seq(db: Connection, owner: str, task_id: str, token: int) -> int | None:
    """Return the `seq` of the task if that claim is the current one, else None."""
    found = db.execute(
        "SELECT live.seq FROM omniq_live AS live JOIN omniq_tasks AS tasks ON tasks.seq = live.seq "
        "WHERE tasks.id = ? AND live.owner = ? AND live.token = ?",
        (task_id, owner, token),
    ).fetchone()
    return None if found is None else found[0]


def mark_attached(db: Connection, seqs: list[int]) -> None:
    """Mark these tasks: they have side data that must be deleted when they end."""
    db.execute(
        "UPDATE omniq_live SET attached = 1 WHERE attached = 0 AND seq IN "
        "(SELECT value FROM json_each(?))",
        (tables.json_text(seqs),),
    )
