"""The claim: promote what came due, ask the gates, take the first tasks in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from omniq.storage import _gates, _rows
from omniq.storage import _sqlite_tables as tables
from omniq.storage._gates import GateState
from omniq.storage._rows import Row
from omniq.storage._sqlite_connection import Connection, statement
from omniq.storage._sqlite_ledger import Ledger
from omniq.storage._sqlite_tables import READY, SUSPECT, Stored
from omniq.storage.base import Claim

PROMOTED_AT_ONCE = 2_000
"""Tasks that one transaction moves from waiting for their time to ready."""

_UNPARKED_AT_ONCE = 500

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
        # Some of what was moved may be suspects.
        has_suspects = True
    if has_parked:
        _unpark(ledger)
        has_suspects = True
    _take(ledger, owner, request, due_by, claimed, bool(has_suspects and not holds_suspect))
    return claimed


def _take(
    ledger: Ledger, owner: str, request: Claim, due_by: int, claimed: Claimed, take_suspect: bool
) -> None:
    """Go through the candidates in order until there are enough."""
    for stored in _candidates(ledger.db, request, take_suspect):
        row = stored.row
        if row.is_suspect and not take_suspect:
            continue
        if row.visible > due_by:
            # Promoted for a caller whose time was ahead of this one's.
            if row.visible > ledger.now:
                ledger.adopt(stored)
                ledger.change(row)
        elif _rows.is_expired(row, due_by):
            ledger.adopt(stored)
            ledger.finish(row, _rows.finish_cancelled(row, ledger.now, "expired"))
            claimed.expired.append(row.id)
        elif not row.gates or _enter_gates(ledger, stored):
            _rows.claim(row, owner, ledger.now)
            take_suspect = take_suspect and not row.is_suspect
            claimed.rows.append(row)
            if len(claimed.rows) == request.limit:
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
    blocking = _gates.blocking(row.gates, states, ledger.now)
    if blocking is not None:
        row.parked = blocking.key
        ledger.adopt(stored)
        ledger.change(row)
        return False
    for gate in row.gates:
        _gates.enter(gate, states[gate.key], row.id, row.token + 1, ledger.now)
    return True


def _unpark(ledger: Ledger) -> None:
    """Move back what a gate has room for again."""
    for key in tables.read_names(ledger.db, statement("parked_keys")):
        state = ledger.gates[key]
        if state.wake_at <= ledger.now:
            _unpark_key(ledger, key, state)
    ledger.flush()


def _unpark_key(ledger: Ledger, key: str, state: GateState) -> None:
    sql = tables.rows_statement("next_parked", body=False)
    first = tables.read_rows(ledger.db, sql, {"key": key, "limit": 1})[0].row
    gate = next(gate for gate in first.gates if gate.key == key)
    free = _gates.room(gate, state, ledger.now)
    if free == 0:
        state.wake_at = _gates.ask_again_at(gate, state, ledger.now)
        return
    limit = min(free, _UNPARKED_AT_ONCE)
    for stored in tables.read_rows(ledger.db, sql, {"key": key, "limit": limit}):
        stored.row.parked = None
        ledger.adopt(stored)
        ledger.change(stored.row)


# Candidates in order


@cache
def _queues_statement(place: int, names: str) -> str:
    return statement("ready_queues").replace("{place}", str(place)).replace("{names}", names)


def ready_queues(db: Connection, place: int, queues: Sequence[str] | None) -> list[list[Any]]:
    """`[priority, due, seq, queue]` of the first task of every queue that is not paused."""
    sql = _queues_statement(place, "all_queues" if queues is None else "given_queues")
    return tables.read_names(db, sql, {"queues": tables.json_text(queues or ())})


def _candidates(db: Connection, request: Claim, with_suspects: bool) -> Iterator[Stored]:
    """Rows of all the queues asked for, in the order they are to be claimed.

    A queue is read only when its first row is the next one, and only as far as it is needed.
    """
    places = (READY, SUSPECT) if with_suspects else (READY,)
    heads = [
        ((-priority, due, seq), place, queue)
        for place in places
        for priority, due, seq, queue in ready_queues(db, place, request.queues)
    ]
    heap: list[tuple[_Order, int, Stored | None, Iterator[Stored]]] = [
        (order, number, None, _rows_of(db, place, queue, request.limit, len(heads)))
        for number, (order, place, queue) in enumerate(heads)
    ]
    heapq.heapify(heap)
    while heap:
        _, number, stored, rest = heap[0]
        if stored is not None:
            yield stored
        following = next(rest, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.row.order, number, following, rest))


def _rows_of(
    db: Connection, place: int, queue: str, wanted: int, sources: int
) -> Iterator[Stored]:
    """The rows of one queue in order, read in pages that grow."""
    sql = tables.rows_statement("next_in_queue", place=place)
    skip, limit = 0, wanted if sources == 1 else max(2, 2 * wanted // sources)
    while True:
        page = tables.read_rows(db, sql, {"queue": queue, "limit": limit, "skip": skip})
        yield from page
        if len(page) < limit:
            return
        skip += limit
        limit = min(limit * 2, max(wanted, 100))
