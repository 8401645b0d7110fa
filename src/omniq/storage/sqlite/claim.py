"""The claim: promote what came due, ask the gates, take the first tasks in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from omniq import gate_rules
from omniq.storage import row_rules
from omniq.storage.row_rules import Row
from omniq.storage.sqlite import tables
from omniq.storage.sqlite.connection import Connection, statement
from omniq.storage.sqlite.record import Ledger
from omniq.storage.sqlite.tables import READY, SUSPECT, Stored
from omniq.storage.types import Claim

PROMOTED_AT_ONCE = 2_000
"""Tasks that one transaction moves from waiting for their time to ready."""

_Order = tuple[int, int, int]


class Claimed:
    """What a claim came to. `is_partial`: more has come due than one transaction may move; ask again."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.expired: list[str] = []
        self.is_partial = False


def claim(ledger: Ledger, owner: str, request: Claim) -> Claimed:
    """Make due tasks the owner's, in order, as many as it asks for."""
    claimed = Claimed()
    due_by = ledger.now if request.now is None else request.now
    has_due, has_parked, has_suspects, holds_suspect = ledger.db.execute(
        statement("survey"), {"owner": owner, "due_by": due_by}
    ).fetchone()
    if has_due:
        moved = ledger.db.execute(
            statement("promote"), {"due_by": due_by, "limit": PROMOTED_AT_ONCE}
        ).rowcount
        if moved == PROMOTED_AT_ONCE:
            # Claiming now could take a task before one of higher priority that is not moved yet.
            claimed.is_partial = True
            return claimed
        # What was moved may be of any kind.
        has_parked = has_suspects = True
    search = _Search(ledger, request, takes_suspect=not holds_suspect)
    search.add_queues(READY)
    if has_suspects and not holds_suspect:
        search.add_queues(SUSPECT)
    if has_parked:
        search.add_lots()
    _take(ledger, owner, search, due_by, claimed)
    return claimed


def _take(ledger: Ledger, owner: str, search: _Search, due_by: int, claimed: Claimed) -> None:
    """Go through the candidates in order until there are enough."""
    for stored in search.candidates():
        row = stored.row
        if row.visible > due_by:
            # Promoted for a caller whose time was ahead of this one's.
            if row.visible > ledger.now:
                ledger.adopt(stored)
                ledger.change(row)
        elif row_rules.is_expired(row, due_by):
            ledger.adopt(stored)
            ledger.finish(row, row_rules.finish_cancelled(row, ledger.now, "expired"))
            claimed.expired.append(row.id)
        elif not row.gates or _enter_gates(ledger, stored):
            row_rules.claim(row, owner, ledger.now)
            claimed.rows.append(row)
            if row.crashes:
                search.takes_suspect = False
            if len(claimed.rows) == search.limit:
                break
    ledger.flush()
    if claimed.rows:
        seqs = tables.json_text([row.seq for row in claimed.rows])
        parameters = {"owner": owner, "now": ledger.now, "seqs": seqs}
        ledger.db.execute(statement("claim"), parameters)


def _enter_gates(ledger: Ledger, stored: Stored) -> bool:
    """Let the row through all its gates, or park it under the one that blocks."""
    row = stored.row
    states = ledger.gates.of(row)
    blocking = gate_rules.blocking(row.gates, states, ledger.now)
    if blocking is not None:
        row.parked = blocking.key
        ledger.adopt(stored)
        ledger.change(row)
        return False
    for gate in row.gates:
        gate_rules.enter(gate, states[gate.key], row.id, row.token + 1, ledger.now)
    return True


class _Source:
    """Rows of one queue or lot in order, read in pages that grow, and only as far as needed."""

    def __init__(self, db: Connection, sql: str, name: str, page: int) -> None:
        self._db = db
        self._sql = sql
        self._name = name
        self._page = page

    def __iter__(self) -> Iterator[Stored]:
        skip, limit = 0, self._page
        while True:
            parameters = {"source": self._name, "limit": limit, "skip": skip}
            page = tables.read_rows(self._db, self._sql, parameters)
            yield from page
            if len(page) < limit:
                return
            skip += limit
            limit = max(limit, min(limit * 2, 256))


class _Search:
    """The rows that a claim may take, from all the places it looks in, in one order."""

    def __init__(self, ledger: Ledger, request: Claim, *, takes_suspect: bool) -> None:
        self.limit = request.limit
        self.takes_suspect = takes_suspect
        self._ledger = ledger
        self._queues = request.queues
        self._heads: list[tuple[_Order, str, str]] = []

    def add_queues(self, place: int) -> None:
        """Look in the queues that were asked for, for ready tasks or for suspects."""
        sql = tables.rows_statement("next_in_queue", place=place)
        for priority, due, seq, queue in ready_queues(self._ledger.db, place, self._queues):
            self._heads.append(((-priority, due, seq), sql, queue))

    def add_lots(self) -> None:
        """Look where tasks are parked whose gate may have room again.

        They take part as they are: one that this claim cannot take keeps nobody out of the room.
        """
        db = self._ledger.db
        paused = tables.read_names(db, "SELECT json_group_array(queue) FROM omniq_paused")
        sql = tables.rows_statement("next_parked")
        for priority, due, seq, lot in tables.read_names(db, statement("parked_lots")):
            is_suspect, queue, key = lot.split("/", 2)
            is_wanted = (
                queue not in paused
                and (self._queues is None or queue in self._queues)
                and (self.takes_suspect or is_suspect == "0")
            )
            if is_wanted and self._ledger.gates[key].wake_at <= self._ledger.now:
                self._heads.append(((-priority, due, seq), sql, lot))

    def candidates(self) -> Iterator[Stored]:
        """The rows in the order they are to be claimed; a source is read when its turn comes."""
        if len(self._heads) == 1:
            yield from self._from_one()
            return
        page = max(2, 2 * self.limit // max(1, len(self._heads)))
        heap: list[tuple[_Order, int, Stored | None, Iterator[Stored]]] = [
            (order, number, None, iter(_Source(self._ledger.db, sql, name, page)))
            for number, (order, sql, name) in enumerate(self._heads)
        ]
        heapq.heapify(heap)
        while heap:
            _, number, stored, rest = heap[0]
            if stored is not None:
                if not self._may_go_on(stored.row):
                    heapq.heappop(heap)
                    continue
                yield stored
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following.row.order, number, following, rest))

    def _from_one(self) -> Iterator[Stored]:
        _, sql, name = self._heads[0]
        for stored in _Source(self._ledger.db, sql, name, self.limit):
            if not self._may_go_on(stored.row):
                return
            yield stored

    def _may_go_on(self, row: Row) -> bool:
        """Whether the row, and those behind it in its source, may be taken at this point."""
        if row.crashes and not self.takes_suspect:
            return False
        if row.parked is None:
            return True
        gate = next(gate for gate in row.gates if gate.key == row.parked)
        state = self._ledger.gates[gate.key]
        if gate_rules.room(gate, state, self._ledger.now) > 0:
            return True
        state.wake_at = gate_rules.ask_again_at(gate, state, self._ledger.now)
        return False


@cache
def _queues_statement(place: int, names: str) -> str:
    return statement("ready_queues").replace("{place}", str(place)).replace("{names}", names)


def ready_queues(db: Connection, place: int, queues: Sequence[str] | None) -> list[list[Any]]:
    """`[priority, due, seq, queue]` of the first task of every queue that is not paused."""
    sql = _queues_statement(place, "all_queues" if queues is None else "given_queues")
    return tables.read_names(db, sql, {"queues": tables.json_text(queues or ())})
