"""The gates of the rows in one step: who enters, who is parked, who is offered the room that is left.

A gate's state is a document. A row that a gate blocks is parked under it, and costs a claim nothing.
When the gate has room again, its first parked rows are *offered*: they return to the ready order, at
their own place. So every parked row depends on one of three events, and a step that causes one
refills the gate:

- a holder leaves the gate;
- the gate's time comes: its document is `due`;
- an offered row ends, or is parked under another gate, without entering.

A limit's state that says nothing any more is deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from omniq import gate_rules
from omniq.gate_rules import FOREVER, Gate, GateState
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage import row_rules
from omniq.storage.backend import Document, DocumentChange, DocumentQuery, Section
from omniq.storage.row_rules import Row, Settled

KIND = "gate"

DUE_GATES = 100
"""The number of gates that one step refills because their time has come."""

_OFFERED, _FIRST_OFFERED = 100, 4
"""Rows of each lot of a gate that one step reads, at most, and as long as the gate's room is unknown."""

_ALL = 10_000

decode_gate = lenient_decoder(GateState, None)


class GateStates:
    """The gates that one step reads and changes."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._now = section.now
        self._read: dict[str, Document] = {}
        self._states: dict[str, GateState] = {}
        self._gates: dict[str, Gate] = {}
        self.refills: set[str] = set()
        """The gates that `offer` has to fill."""
        self._parked: set[str] = set()
        self._offered: dict[str, int] = {}
        self._due_by: int | None = None
        self._passed: set[str] = set()

    async def load(self, rows: Iterable[Row]) -> None:
        """Read the gates of these rows."""
        keys = {gate.key for row in rows if row.gates for gate in row.gates} - self._states.keys()
        if keys:
            found = await self._section.documents(KIND, sorted(keys))
            for key in keys:
                self._add(key, found.get(key))

    def _add(self, key: str, document: Document | None) -> None:
        state = None
        if document is not None:
            self._read[key] = document
            state = decode_gate(document.data)
        self._states[key] = state or GateState()

    # Claims and outcomes

    def enter(self, row: Row) -> bool:
        """Enter all gates of a row that is about to be claimed, or park it under the first that blocks."""
        gates, states, now = row.gates, self._states, self._now
        blocking: Gate | None = gates[0]
        # A gate that has blocked a row blocks the next ones too: nothing leaves it while a step claims.
        if gates[0].key not in self._parked:
            blocking = gate_rules.blocking(gates, states, now)
        if blocking is not None:
            # If a caller's `now` is ahead, a parked row could take room before it is due.
            if row.visible <= now:
                self._park(row, blocking)
            return False
        token = row_rules.next_token(row, self._section.epoch)
        for gate in gates:
            key, state = gate.key, states[gate.key]
            self._gates[key] = gate
            gate_rules.enter(gate, state, row.id, token, now)
            self._passed.discard(key)
            if state.has_parked and gate_rules.room(gate, state, now) == 0:
                state.wake_at = gate_rules.ask_again_at(gate, state, now)
        return True

    def _park(self, row: Row, blocking: Gate) -> None:
        key = row.parked = blocking.key
        if key not in self._parked:
            # Always a change of the state: another step that is about to write that nothing is parked,
            # or has written it since the state was read, and this one must not both succeed.
            state = self._states[key]
            state.parks += 1
            state.has_parked = True
            self._gates[key] = blocking
            self._parked.add(key)
        if len(row.gates) > 1:
            self.refill(row)
            self.refills.discard(key)

    def leave(self, row: Row, token: int, settled: Settled) -> None:
        """Take the claim with that token out of its gates."""
        effect, reason = settled.effect, settled.reason
        for gate in row.gates:
            state = self._states[gate.key]
            gate_rules.leave(gate, state, row.id, token, effect, self._now, reason)
        self.refill(row)

    def refill(self, row: Row) -> None:
        """Have `offer` fill the room that this row leaves to others in its gates."""
        for gate in row.gates:
            self._gates[gate.key] = gate
            if self._states[gate.key].has_parked:
                self.refills.add(gate.key)

    # Parked rows

    async def wake(self, due_by: int) -> bool:
        """Have `offer` refill the gates whose time has come; returns whether there may be more."""
        query = DocumentQuery(kind=KIND, due_by=self._now, limit=DUE_GATES)
        if due_by < self._now:
            # A caller's `now` lies behind, and what was offered may not be due then: offer the rows
            # that are. Workers never do this, so it may cost more.
            self._due_by = due_by
            query = DocumentQuery(kind=KIND, limit=_ALL)
        due = await self._section.find_documents(query)
        for document in due:
            if document.key not in self._states:
                self._add(document.key, document)
            if self._states[document.key].has_parked:
                self.refills.add(document.key)
            elif document.due is not None and document.due <= self._now:
                self._passed.add(document.key)
        return len(due) == DUE_GATES

    async def offer(self, changed: Container[str]) -> list[Row]:
        """Take the first rows out of the gates that have room, and return them.

        `changed` has the ids of rows that this step has changed: the store still has those as they were
        before.
        """
        offered: list[Row] = []
        # Again if the first rows of a gate show that it has room for more of them.
        while self.refills:
            keys_by_limit: dict[int, list[str]] = {}
            for key in sorted(self.refills):
                if limit := self._rows_to_read(key):
                    keys_by_limit.setdefault(limit, []).append(key)
            self.refills.clear()
            for limit, keys in keys_by_limit.items():
                parked: dict[str, list[Row]] = {key: [] for key in keys}
                for row in await self._section.parked(keys, limit):
                    parked[row.parked or ""].append(row)
                for key, rows in parked.items():
                    self._offer_from(key, rows, limit, changed, offered)
        return offered

    def _rows_to_read(self, key: str) -> int:
        """How many rows of each lot to read: as many as there is room for.

        And one more, to see if more wait, where no event will ask again before the gate's time comes. The
        store still has the rows that were offered earlier in this step.
        """
        if self._due_by is not None:
            return _ALL
        gate, offered = self._gates.get(key), self._offered.get(key, 0)
        if gate is None:
            return _FIRST_OFFERED + offered
        room = gate_rules.room(gate, self._states[key], self._now)
        if room == 0:
            return 0
        return min(room + (gate.kind != "running"), _OFFERED) + offered

    def _offer_from(
        self,
        key: str,
        rows: list[Row],
        limit: int,
        changed: Container[str],
        offered: list[Row],
    ) -> None:
        """Add the first rows of each lot, as many as there is room for, to `offered`."""
        state = self._states[key]
        # The store does not have the rows yet that this step parks.
        parks = key in self._parked
        if not rows:
            state.has_parked = parks
            return
        gate = self._gates.get(key)
        # Damaged rows have lost their gates, so that nothing blocks them.
        room = FOREVER
        if gate is not None:
            room = gate_rules.room(gate, state, self._now)
        elif (gate := _gate_of(rows, key)) is not None:
            self._gates[key] = gate
            room = gate_rules.room(gate, state, self._now)
            if room > limit <= len(rows):
                self.refills.add(key)
                return
        due_by = FOREVER if self._due_by is None else self._due_by
        has_more, is_any_left, count = self._due_by is not None, False, len(offered)
        asks_again = False
        readable = limit - self._offered.get(key, 0)
        for lot in _lots(rows):
            has_more = has_more or len(lot) == limit
            places = room
            for row in lot:
                if row.id in changed:
                    continue
                if row.visible > due_by:
                    # A caller's `now` lies behind. A claim that others make now may take the row.
                    asks_again = True
                    continue
                if not row.gates:
                    # Damaged. It does not enter, so that nothing would refill the gate.
                    asks_again = True
                elif places == 0:
                    is_any_left = True
                    break
                else:
                    places -= 1
                row.parked = None
                offered.append(row)
        self._offered[key] = self._offered.get(key, 0) + len(offered) - count
        if gate is not None and room == 0:
            state.wake_at = gate_rules.ask_again_at(gate, state, self._now)
        elif has_more and (room > readable or asks_again):
            state.wake_at = self._now
        else:
            # What was offered will enter, and then the gate has no room, or refill the gate.
            state.wake_at = FOREVER
            state.has_parked = parks or has_more or is_any_left

    # Writing

    def changes(self) -> list[DocumentChange]:
        """The documents that have changed."""
        changed: list[DocumentChange] = []
        for key, state in self._states.items():
            stored = self._read.get(key)
            before, read_due = (None, None) if stored is None else (stored.data, stored.due)
            due, after = None, None
            if not self._says_nothing(key, state):
                due, after = self._due(key, state, read_due), encode_internal(state)
            if after != before or (after is not None and due != read_due):
                changed.append(DocumentChange(KIND, key, before, after, due))
        return changed

    def _due(self, key: str, state: GateState, read_due: int | None) -> int | None:
        if state.has_parked:
            return state.wake_at if state.wake_at < FOREVER else None
        if not state.starts:
            return None
        # Nothing is parked, so nothing happens then but that the state is forgotten.
        gate = self._gates.get(key)
        return read_due if gate is None else state.starts[-1] + gate.span

    def _says_nothing(self, key: str, state: GateState) -> bool:
        if state.holders or state.has_parked or key.startswith("breaker:"):
            # There are few breakers, and operators want to see those that are closed.
            return False
        return not state.starts or key in self._passed


def _lots(rows: list[Row]) -> Collection[list[Row]]:
    """The rows that a claim may take alike: those of one queue and function, suspects apart."""
    if len(rows) == 1:
        return (rows,)
    lots: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        lots.setdefault((row.queue, row.func_path, row.crashes > 0), []).append(row)
    return lots.values()


def _gate_of(rows: list[Row], key: str) -> Gate | None:
    """The gate with this key, as the first row has it that is not damaged."""
    return next((gate for row in rows for gate in row.gates if gate.key == key), None)
