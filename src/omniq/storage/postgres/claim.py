"""Claim: the rule path of a claim, for gated, suspect and expired tasks.

Ordinary tasks are claimed by the fast path (`record_and_claim`), which hands a claim over to this
module when it finds a task that needs a rule.
"""

from __future__ import annotations

from typing import Any

from omniq import gate_rules
from omniq.storage import row_rules
from omniq.storage.postgres import encoding
from omniq.storage.postgres.encoding import StoredRow
from omniq.storage.postgres.record import Recorder
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim

_MAX_READ = 4_000
"""Tasks that one transaction reads; if it has claimed none by then, another one continues."""

_LARGEST_PAGE = 500
_START = -(2**63)


class Claimed:
    """The result of a claim. `is_partial`: nothing was claimed yet, and there is more to search."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.expired: list[str] = []
        self.is_partial = False


async def claim_by_rules(recorder: Recorder, owner: str, request: Claim) -> Claimed:
    """Claim up to `request.limit` due tasks for the owner, in claim order."""
    due_by = recorder.now if request.now is None else request.now
    survey = await recorder.db.fetchrow(
        recorder.names("SELECT * FROM {schema}.survey($1, $2, $3, $4, $5)"),
        owner,
        None if request.queues is None else list(request.queues),
        request.limit,
        recorder.now,
        due_by,
    )
    search = _Search(recorder, owner, request.limit, due_by)
    if survey["is_partial"]:
        search.claimed.is_partial = True
        return search.claimed
    search.ready, search.gated = survey["ready"], survey["gated"]
    search.suspects, search.lots = survey["suspects"], survey["lots"]
    await search.run()
    await recorder.flush()
    return search.claimed


class _Search:
    """Reads the rows that a claim may take, in claim order, until it has claimed enough.

    `ready`, `gated` and `suspects` are the queues to search for tasks of that kind; `lots` are the
    groups of parked tasks.
    """

    def __init__(self, recorder: Recorder, owner: str, limit: int, due_by: int) -> None:
        self.claimed = Claimed()
        self.ready: list[str] = []
        self.gated: list[str] = []
        self.suspects: list[str] = []
        self.lots: list[str] = []
        self._recorder = recorder
        self._owner = owner
        self._limit = limit
        self._due_by = due_by
        self._position = (_START, _START, _START)

    async def run(self) -> None:
        """Claim page by page. The page size doubles, for when few tasks of a page can be claimed."""
        read, size = 0, self._limit
        while len(self.claimed.rows) < self._limit:
            if read >= _MAX_READ:
                # Locks on rows that are held for long delay other transactions.
                self.claimed.is_partial = not self.claimed.rows
                return
            page = await self._read_page(size)
            if not page:
                return
            read += len(page)
            self._position = _position_of(page[-1])
            for stored in await self._lock(page):
                self._claim_or_change(stored)
                if len(self.claimed.rows) == self._limit:
                    break
            size = min(size * 2, max(_LARGEST_PAGE, self._limit))

    async def _read_page(self, size: int) -> list[Any]:
        """The next rows of all places together, in claim order: id and position of each."""
        sql = self._recorder.names.file("candidates")
        found: list[Any] = await self._recorder.db.fetch(
            sql, self.ready, self.gated, self.suspects, self.lots, *self._position, size
        )
        return found

    async def _lock(self, page: list[Any]) -> list[StoredRow]:
        """Lock the rows of a page, skipping locked ones; also reads the state of their gates."""
        sql = self._recorder.names(
            f"SELECT {encoding.LIVE_COLUMNS} FROM {{schema}}.live "
            "WHERE id = ANY ($1) AND place <> 4 "
            "ORDER BY rank, due, seq FOR UPDATE SKIP LOCKED"
        )
        records = await self._recorder.db.fetch(sql, [record["id"] for record in page])
        locked = [encoding.stored_row(record) for record in records]
        await self._recorder.gates.load_for(stored.row for stored in locked)
        return locked

    def _claim_or_change(self, stored: StoredRow) -> None:
        """Claim the row, end it as expired, park it under a gate, or leave it unchanged."""
        recorder, row = self._recorder, stored.row
        if not self._may_take(row):
            return
        recorder.track(stored)
        if row.visible > self._due_by:
            # Moved to a ready place for a caller whose `now` was later than this one's.
            if row.visible > recorder.now:
                recorder.change(row)
        elif row_rules.is_expired(row, self._due_by):
            recorder.finish(row, row_rules.finish_cancelled(row, recorder.now, "expired"))
            self.claimed.expired.append(row.id)
        elif self._enter_gates(row):
            recorder.claim(row, self._owner)
            self.claimed.rows.append(row)
            if row.is_suspect:
                self.suspects = []
                self.lots = [lot for lot in self.lots if lot.startswith("0/")]

    def _may_take(self, row: Row) -> bool:
        """Whether the claim still searches the row's place.

        For a parked row whose gate has no room this sets the gate's `wake_at`, and the claim stops
        searching the lots of that gate.
        """
        if row.is_suspect and any(taken.is_suspect for taken in self.claimed.rows):
            return False
        if row.parked is None:
            return True
        gate = next(gate for gate in row.gates if gate.key == row.parked)
        state = self._recorder.gates[gate.key]
        if gate_rules.room(gate, state, self._recorder.now) > 0:
            return True
        state.wake_at = gate_rules.ask_again_at(gate, state, self._recorder.now)
        self.lots = [lot for lot in self.lots if lot.split("/", 2)[2] != gate.key]
        return False

    def _enter_gates(self, row: Row) -> bool:
        """Enter all gates of the row, or park it under the first one that blocks."""
        if not row.gates:
            return True
        recorder = self._recorder
        states = recorder.gates.of(row)
        blocking = gate_rules.blocking(row.gates, states, recorder.now)
        if blocking is not None:
            row.parked = blocking.key
            recorder.change(row)
            return False
        for gate in row.gates:
            gate_rules.enter(gate, states[gate.key], row.id, row.token + 1, recorder.now)
        return True


def _position_of(record: Any) -> tuple[int, int, int]:
    return record["rank"], record["due"], record["seq"]
