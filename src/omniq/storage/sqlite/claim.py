"""Claim: moves due tasks to the ready places, then claims the first tasks that pass their gates."""

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
from omniq.storage.sqlite.record import Recorder
from omniq.storage.sqlite.tables import READY, SUSPECT, StoredRow
from omniq.storage.types import Claim

PROMOTE_BATCH = 2_000
"""The maximum number of delayed tasks that one transaction makes ready."""

_Order = tuple[int, int, int]


class Claimed:
    """The result of a claim. `is_partial`: none was claimed, and more due tasks must be moved."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.expired: list[str] = []
        self.is_partial = False


def claim_by_rules(recorder: Recorder, owner: str, request: Claim) -> Claimed:
    """Claim up to `request.limit` due tasks for the owner, in claim order."""
    claimed = Claimed()
    due_by = recorder.now if request.now is None else request.now
    has_due, has_parked, has_suspects, holds_suspect = recorder.db.execute(
        statement("claimable_kinds"), {"owner": owner, "due_by": due_by}
    ).fetchone()
    if has_due:
        moved = recorder.db.execute(
            statement("promote"), {"due_by": due_by, "limit": PROMOTE_BATCH}
        ).rowcount
        if moved == PROMOTE_BATCH:
            # A claim now could take a task before one of higher priority that is not moved yet.
            claimed.is_partial = True
            return claimed
        # The moved tasks may be parked ones or suspects.
        has_parked = has_suspects = True
    search = _Search(recorder, request, takes_suspect=not holds_suspect)
    search.add_queues(READY)
    if has_suspects and not holds_suspect:
        search.add_queues(SUSPECT)
    if has_parked:
        search.add_lots()
    _claim_candidates(recorder, owner, search, due_by, claimed)
    return claimed


def _claim_candidates(
    recorder: Recorder, owner: str, search: _Search, due_by: int, claimed: Claimed
) -> None:
    """Claim, end, park or skip the candidates in order, until enough are claimed."""
    for stored in search.candidates():
        row = stored.row
        if row.visible > due_by:
            # Moved to a ready place for a caller whose `now` was later than this one's.
            if row.visible > recorder.now:
                recorder.track(stored)
                recorder.change(row)
        elif row_rules.is_expired(row, due_by):
            recorder.track(stored)
            recorder.finish(row, row_rules.finish_cancelled(row, recorder.now, "expired"))
            claimed.expired.append(row.id)
        elif not row.gates or _enter_gates(recorder, stored):
            row_rules.claim(row, owner, recorder.now)
            claimed.rows.append(row)
            if row.crashes:
                search.takes_suspect = False
            if len(claimed.rows) == search.limit:
                break
    recorder.flush()
    if claimed.rows:
        seqs = tables.json_text([row.seq for row in claimed.rows])
        parameters = {"owner": owner, "now": recorder.now, "seqs": seqs}
        recorder.db.execute(statement("claim"), parameters)


def _enter_gates(recorder: Recorder, stored: StoredRow) -> bool:
    """Enter all gates of the row, or park it under the first one that blocks."""
    row = stored.row
    states = recorder.gates.of(row)
    blocking = gate_rules.blocking(row.gates, states, recorder.now)
    if blocking is not None:
        row.parked = blocking.key
        recorder.track(stored)
        recorder.change(row)
        return False
    for gate in row.gates:
        gate_rules.enter(gate, states[gate.key], row.id, row.token + 1, recorder.now)
    return True


class _Source:
    """The rows of one queue or lot in claim order, read in growing pages as they are needed."""

    def __init__(self, db: Connection, sql: str, name: str, page: int) -> None:
        self._db = db
        self._sql = sql
        self._name = name
        self._page = page

    def __iter__(self) -> Iterator[StoredRow]:
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
    """The rows that a claim may take, merged from all queues and lots in claim order."""

    def __init__(self, recorder: Recorder, request: Claim, *, takes_suspect: bool) -> None:
        self.limit = request.limit
        self.takes_suspect = takes_suspect
        self._recorder = recorder
        self._queues = request.queues
        self._heads: list[tuple[_Order, str, str]] = []

    def add_queues(self, place: int) -> None:
        """Add the requested queues: their ready tasks, or their suspects."""
        sql = tables.rows_statement("next_in_queue", place=place)
        for priority, due, seq, queue in ready_queues(self._recorder.db, place, self._queues):
            self._heads.append(((-priority, due, seq), sql, queue))

    def add_lots(self) -> None:
        """Add the lots of parked tasks whose gate may have room again.

        The tasks stay parked until they are claimed, so one that cannot be taken uses no room.
        """
        db = self._recorder.db
        paused = tables.read_array(db, "SELECT json_group_array(queue) FROM omniq_paused")
        sql = tables.rows_statement("next_parked")
        for priority, due, seq, lot in tables.read_array(db, statement("parked_lots")):
            is_suspect, queue, key = lot.split("/", 2)
            is_wanted = (
                queue not in paused
                and (self._queues is None or queue in self._queues)
                and (self.takes_suspect or is_suspect == "0")
            )
            if is_wanted and self._recorder.gates[key].wake_at <= self._recorder.now:
                self._heads.append(((-priority, due, seq), sql, lot))

    def candidates(self) -> Iterator[StoredRow]:
        """The rows in claim order; a source is read when its first row is the next one."""
        if len(self._heads) == 1:
            yield from self._from_single_source()
            return
        page = max(2, 2 * self.limit // max(1, len(self._heads)))
        heap: list[tuple[_Order, int, StoredRow | None, Iterator[StoredRow]]] = [
            (order, number, None, iter(_Source(self._recorder.db, sql, name, page)))
            for number, (order, sql, name) in enumerate(self._heads)
        ]
        heapq.heapify(heap)
        while heap:
            _, number, stored, rest = heap[0]
            if stored is not None:
                if not self._may_take(stored.row):
                    heapq.heappop(heap)
                    continue
                yield stored
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following.row.order, number, following, rest))

    def _from_single_source(self) -> Iterator[StoredRow]:
        _, sql, name = self._heads[0]
        for stored in _Source(self._recorder.db, sql, name, self.limit):
            if not self._may_take(stored.row):
                return
            yield stored

    def _may_take(self, row: Row) -> bool:
        """Whether the row, and the later ones of its source, may be taken at this point.

        For a parked row whose gate has no room this sets the gate's `wake_at`.
        """
        if row.crashes and not self.takes_suspect:
            return False
        if row.parked is None:
            return True
        gate = next(gate for gate in row.gates if gate.key == row.parked)
        state = self._recorder.gates[gate.key]
        if gate_rules.room(gate, state, self._recorder.now) > 0:
            return True
        state.wake_at = gate_rules.ask_again_at(gate, state, self._recorder.now)
        return False


@cache
def _queues_statement(place: int, names: str) -> str:
    return statement("ready_queues").replace("{place}", str(place)).replace("{names}", names)


def ready_queues(db: Connection, place: int, queues: Sequence[str] | None) -> list[list[Any]]:
    """Return `[priority, due, seq, queue]` of the first task of every queue that is not paused."""
    sql = _queues_statement(place, "all_queues" if queues is None else "given_queues")
    return tables.read_array(db, sql, {"queues": tables.json_text(queues or ())})
