"""The slower claim: gates, suspects, tasks past their time. What `turn` leaves to it."""

from __future__ import annotations

from typing import Any

from omniq import gate_rules
from omniq.storage import row_rules
from omniq.storage.postgres import encoding
from omniq.storage.postgres.encoding import Stored
from omniq.storage.postgres.record import Ledger
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim

_LONGEST_WALK = 4_000
"""Tasks that one transaction looks at; when it has found too little by then, another goes on."""

_LARGEST_PAGE = 500
_START = -(2**63)


class Claimed:
    """What a claim came to. `is_partial`: there is more to look through; ask again."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.expired: list[str] = []
        self.is_partial = False


async def claim(ledger: Ledger, owner: str, request: Claim) -> Claimed:
    """Make due tasks the owner's, in order, as many as it asks for."""
    due_by = ledger.now if request.now is None else request.now
    survey = await ledger.db.fetchrow(
        ledger.names("SELECT * FROM {schema}.survey($1, $2, $3, $4, $5)"),
        owner,
        None if request.queues is None else list(request.queues),
        request.limit,
        ledger.now,
        due_by,
    )
    search = _Search(ledger, owner, request.limit, due_by)
    if survey["is_partial"]:
        search.claimed.is_partial = True
        return search.claimed
    search.ready, search.gated = survey["ready"], survey["gated"]
    search.suspects, search.lots = survey["suspects"], survey["lots"]
    await search.run()
    await ledger.flush()
    return search.claimed


class _Search:
    """Goes through the rows that a claim may take, in order, until there are enough."""

    def __init__(self, ledger: Ledger, owner: str, limit: int, due_by: int) -> None:
        self.claimed = Claimed()
        self.ready: list[str] = []
        self.gated: list[str] = []
        self.suspects: list[str] = []
        self.lots: list[str] = []
        self._ledger = ledger
        self._owner = owner
        self._limit = limit
        self._due_by = due_by
        self._position = (_START, _START, _START)

    async def run(self) -> None:
        """Claim page by page. Pages grow while little is found in them."""
        walked, size = 0, self._limit
        while len(self.claimed.rows) < self._limit:
            if walked >= _LONGEST_WALK:
                # Rows that are locked for long keep others waiting.
                self.claimed.is_partial = not self.claimed.rows
                return
            page = await self._page(size)
            if not page:
                return
            walked += len(page)
            self._position = _place(page[-1])
            for stored in await self._lock(page):
                self._consider(stored)
                if len(self.claimed.rows) == self._limit:
                    break
            size = min(size * 2, max(_LARGEST_PAGE, self._limit))

    async def _page(self, size: int) -> list[Any]:
        """The next rows in the order of all places together: id and position of each."""
        sql = self._ledger.names.file("candidates")
        found: list[Any] = await self._ledger.db.fetch(
            sql, self.ready, self.gated, self.suspects, self.lots, *self._position, size
        )
        return found

    async def _lock(self, page: list[Any]) -> list[Stored]:
        """The rows of a page that nobody else has, in order, with the state of their gates."""
        sql = self._ledger.names(
            f"SELECT {encoding.LIVE} FROM {{schema}}.live WHERE id = ANY ($1) AND place <> 4 "
            "ORDER BY rank, due, seq FOR UPDATE SKIP LOCKED"
        )
        records = await self._ledger.db.fetch(sql, [record["id"] for record in page])
        locked = [encoding.stored_of(record) for record in records]
        await self._ledger.gates.load_for(stored.row for stored in locked)
        return locked

    def _consider(self, stored: Stored) -> None:
        """Take the row, end it, park it, or leave it as it is."""
        ledger, row = self._ledger, stored.row
        if not self._is_in_reach(row):
            return
        ledger.adopt(stored)
        if row.visible > self._due_by:
            # Promoted for a caller whose time was ahead of this one's.
            if row.visible > ledger.now:
                ledger.change(row)
        elif row_rules.is_expired(row, self._due_by):
            ledger.finish(row, row_rules.finish_cancelled(row, ledger.now, "expired"))
            self.claimed.expired.append(row.id)
        elif self._enter_gates(row):
            ledger.claim(row, self._owner)
            self.claimed.rows.append(row)
            if row.is_suspect:
                self.suspects = []
                self.lots = [lot for lot in self.lots if lot.startswith("0/")]

    def _is_in_reach(self, row: Row) -> bool:
        """Whether its place is still one that the claim looks into."""
        if row.is_suspect and any(taken.is_suspect for taken in self.claimed.rows):
            return False
        if row.parked is None:
            return True
        gate = next(gate for gate in row.gates if gate.key == row.parked)
        state = self._ledger.gates[gate.key]
        if gate_rules.room(gate, state, self._ledger.now) > 0:
            return True
        state.wake_at = gate_rules.ask_again_at(gate, state, self._ledger.now)
        self.lots = [lot for lot in self.lots if lot.split("/", 2)[2] != gate.key]
        return False

    def _enter_gates(self, row: Row) -> bool:
        """Let the row through all its gates, or park it under the one that blocks."""
        if not row.gates:
            return True
        ledger = self._ledger
        states = ledger.gates.of(row)
        blocking = gate_rules.blocking(row.gates, states, ledger.now)
        if blocking is not None:
            row.parked = blocking.key
            ledger.change(row)
            return False
        for gate in row.gates:
            gate_rules.enter(gate, states[gate.key], row.id, row.token + 1, ledger.now)
        return True


def _place(record: Any) -> tuple[int, int, int]:
    return record["rank"], record["due"], record["seq"]
