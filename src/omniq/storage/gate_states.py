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

from collections.abc import Callable, Collection, Container, Iterable

import msgspec

from omniq import gate_rules
from omniq.gate_rules import FOREVER, Gate, GateState, Special
from omniq.storage import row_rules
from omniq.storage.backend import Document, DocumentChange, DocumentQuery, Section
from omniq.storage.row_rules import Row, Settled

KIND = "gate"

DUE_GATES = 100
"""The number of gates that one step refills because their time has come."""

_OFFERED, _FIRST_OFFERED = 100, 4
"""Rows of each lot of a gate that one step reads, at most, and as long as the gate's room is unknown."""

_ALL = 10_000

decode_gate = gate_rules.decode_state


class _KnownGate(msgspec.Struct, gc=False):
    """A gate in one step: its state, as it was stored before and as the step changes it.

    `gate`: what it admits, once a row has said it. `parks`: the step has parked rows under it, which the
    store does not have yet. `offered`: the number of rows that the step has taken out of it. `is_over`:
    its time has come and nothing is parked, so that its starts say nothing any more.
    """

    key: str
    stored: Document | None
    state: GateState
    gate: Gate | None = None
    parks: bool = False
    offered: int = 0
    is_over: bool = False

    def change(self, now: int) -> DocumentChange | None:
        """The change of its document, if there is one."""
        if self.is_over:
            gate_rules.clear_expired(self.state, now)
        gate_rules.tidy(self.state, now)
        before, read_due = None, None
        if self.stored is not None:
            before, read_due = self.stored.data, self.stored.due
        due, after = None, None
        if not self._says_nothing():
            due, after = self._due(read_due), gate_rules.encode_state(self.state)
        if after == before and (after is None or due == read_due):
            return None
        return DocumentChange(KIND, self.key, before, after, due)

    def _due(self, read_due: int | None) -> int | None:
        state = self.state
        if state.has_parked:
            return state.wake_at if state.wake_at < FOREVER else None
        # Nothing is parked, so nothing happens then but that the state is forgotten.
        held = 0 if state.special is None else state.special.held_until
        due = held if held < FOREVER else 0
        if state.starts and self.gate is None:
            due = max(due, read_due or 0)
        elif state.starts and self.gate is not None:
            due = max(due, state.starts[-1] + gate_rules.in_force(self.gate, state).span)
        return due or None

    def _says_nothing(self) -> bool:
        state = self.state
        if state.holders or state.has_parked or self.key.startswith("breaker:"):
            # There are few breakers, and operators want to see those that are closed.
            return False
        if state.special is not None and state.special.is_changed:
            return False
        return not state.starts


class GateStates:
    """The gates that one step reads and changes."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._now = section.now
        self._known: dict[str, _KnownGate] = {}
        self.refills: set[str] = set()
        """The gates that `offer` has to fill."""
        self._due_by: int | None = None

    async def load(self, rows: Iterable[Row]) -> None:
        """Read the gates of these rows."""
        keys = {gate.key for row in rows if row.gates for gate in row.gates} - self._known.keys()
        if keys:
            found = await self._section.documents(KIND, sorted(keys))
            for key in keys:
                self._add(key, found.get(key))

    def _add(self, key: str, document: Document | None) -> None:
        state = None if document is None else decode_gate(document.data)
        self._known[key] = _KnownGate(key, document, state or GateState())

    # Claims and outcomes

    def enter(self, row: Row) -> bool:
        """Enter all gates of a row that is about to be claimed, or park it under the first that blocks."""
        now = self._now
        for gate in row.gates:
            known = self._known[gate.key]
            # A gate that has blocked a row blocks the next ones too: nothing leaves it while a step claims.
            if known.parks or not self._admits(gate, known.state, row):
                # If a caller's `now` is ahead, a parked row could take room before it is due.
                if row.visible <= now:
                    self._park(row, gate, known)
                return False
        token = row_rules.next_token(row, self._section.epoch)
        for gate in row.gates:
            known = self._known[gate.key]
            state = known.state
            gate_rules.enter(gate, state, row.id, token, now)
            if gate.cost > 1:
                self._unsave(row, known)
            known.gate, known.is_over = gate, False
            if state.has_parked and gate_rules.room(gate, state, now) == 0:
                state.wake_at = gate_rules.ask_again_at(gate, state, now)
        return True

    def _admits(self, gate: Gate, state: GateState, row: Row) -> bool:
        if gate.cost == 1 and state.special is None:
            return gate_rules.room(gate, state, self._now) > 0
        return gate_rules.admits(gate, state, self._now, row.order)

    def _park(self, row: Row, gate: Gate, known: _KnownGate) -> None:
        row.parked = gate.key
        if gate.cost > 1:
            gate_rules.save_room(gate, known.state, self._now, row.order)
        if not known.parks:
            # Always a change of the state: another step that is about to write that nothing is parked,
            # or has written it since the state was read, and this one must not both succeed.
            state = known.state
            state.parks += 1
            state.has_parked = True
            state.wake_at = gate_rules.ask_again_at(gate, state, self._now)
            known.gate, known.parks = gate, True
        if len(row.gates) > 1:
            for other in row.gates:
                if other.cost > 1 and other is not gate:
                    self._unsave(row, self._known[other.key])
            self.refill(row)
            self.refills.discard(gate.key)

    def leave(self, row: Row, token: int, settled: Settled) -> None:
        """Take the claim with that token out of its gates."""
        effect, reason = settled.effect, settled.reason
        for gate in row.gates:
            state = self._known[gate.key].state
            gate_rules.leave(gate, state, row.id, token, effect, self._now, reason)
        self.refill(row)

    def refill(self, row: Row) -> None:
        """Have `offer` fill the room that this row leaves to others in its gates."""
        for gate in row.gates:
            known = self._known[gate.key]
            known.gate = gate
            if known.state.has_parked:
                self.refills.add(gate.key)

    def forget(self, row: Row) -> None:
        """Save no room for a row that ends before it has entered, and have `offer` give it to others."""
        for gate in row.gates:
            if gate.cost > 1 and (known := self._known.get(gate.key)) is not None:
                self._unsave(row, known)

    def _unsave(self, row: Row, known: _KnownGate) -> None:
        special = known.state.special
        if special is not None and special.saved_until and special.saved_for == row.order:
            special.saved_until = 0
            if known.state.has_parked:
                known.gate = None
                self.refills.add(known.key)

    async def edit(self, key: str, change: Callable[[Special], None]) -> None:
        """Change what operators say of a limit, and have `offer` release what is parked under it."""
        self._add(key, await self._section.document(KIND, key))
        known = self._known[key]
        state = known.state
        special = state.special = state.special or Special()
        change(special)
        state.wake_at = 0
        if state.has_parked:
            self.refills.add(key)

    async def close_breaker(self, key: str) -> bool:
        """Close the breaker, and have `offer` release what is parked under it; False if there is none."""
        document = await self._section.document(KIND, key)
        if document is None:
            return False
        self._add(key, document)
        gate_rules.close_breaker(self._known[key].state)
        self.refills.add(key)
        return True

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
            if document.key not in self._known:
                self._add(document.key, document)
            known = self._known[document.key]
            if known.state.has_parked:
                self.refills.add(document.key)
            elif document.due is not None and document.due <= self._now:
                known.is_over = True
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
                known = self._known[key]
                if limit := self._rows_to_read(known):
                    keys_by_limit.setdefault(limit, []).append(key)
                elif known.gate is not None and known.state.wake_at == 0:
                    # It has less room than before: an operator has changed it.
                    at = gate_rules.ask_again_at(known.gate, known.state, self._now)
                    known.state.wake_at = at
            self.refills.clear()
            for limit, keys in keys_by_limit.items():
                parked: dict[str, list[Row]] = {key: [] for key in keys}
                for row in await self._section.parked(keys, limit):
                    parked[row.parked or ""].append(row)
                for key, rows in parked.items():
                    offered += self._offer_from(self._known[key], rows, limit, changed)
        return offered

    def _rows_to_read(self, known: _KnownGate) -> int:
        """How many rows of each lot to read: as many as there is room for.

        And one more, to see if more wait, where no event will ask again before the gate's time comes. The
        store still has the rows that were offered earlier in this step.
        """
        if self._due_by is not None:
            return _ALL
        gate = known.gate
        if gate is None:
            return _FIRST_OFFERED + known.offered
        room = self._places(gate, known.state)
        if room == 0:
            return 0
        return min(room + (gate.kind != "running"), _OFFERED) + known.offered

    def _places(self, gate: Gate, state: GateState) -> int:
        """How many rows to offer, if each takes one unit.

        One at least while room is saved for a row: a claim that takes it must ask again.
        """
        room = gate_rules.room(gate, state, self._now)
        special = state.special
        if room or special is None or special.held_until > self._now:
            return room
        return int(special.saved_until > self._now)

    def _offer_from(
        self, known: _KnownGate, rows: list[Row], limit: int, changed: Container[str]
    ) -> list[Row]:
        """Offer the first rows of each lot, as many as there is room for."""
        state = known.state
        if not rows:
            state.has_parked = known.parks
            return []
        is_first_look = known.gate is None
        gate = known.gate = known.gate or _gate_of(rows, known.key)
        # Damaged rows have lost their gates, so that nothing blocks them.
        room = FOREVER if gate is None else self._places(gate, state)
        if is_first_look and gate is not None and room > limit <= len(rows):
            self.refills.add(known.key)
            return []
        due_by = FOREVER if self._due_by is None else self._due_by
        has_more, is_any_left, asks_again = self._due_by is not None, False, False
        readable = limit - known.offered
        offered: list[Row] = []
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
                elif places <= 0:
                    is_any_left = True
                    break
                else:
                    places -= _cost_of(row, known.key)
                row.parked = None
                offered.append(row)
        known.offered += len(offered)
        if gate is not None and room == 0:
            state.wake_at = gate_rules.ask_again_at(gate, state, self._now)
        elif has_more and (room > readable or asks_again):
            state.wake_at = self._now
        else:
            # What was offered will enter, and then the gate has no room, or refill the gate.
            state.wake_at = FOREVER
            state.has_parked = known.parks or has_more or is_any_left
        return offered

    # Writing

    def changes(self) -> list[DocumentChange]:
        """The documents that have changed."""
        changes = [known.change(self._now) for known in self._known.values()]
        return [change for change in changes if change is not None]


def _lots(rows: list[Row]) -> Collection[list[Row]]:
    """The rows that a claim may take alike: those of one queue and function, suspects apart."""
    if len(rows) == 1:
        return (rows,)
    lots: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        lots.setdefault((row.queue, row.func_path, row.crashes > 0), []).append(row)
    return lots.values()


def _cost_of(row: Row, key: str) -> int:
    if len(row.gates) == 1:
        return row.gates[0].cost
    return next((gate.cost for gate in row.gates if gate.key == key), 1)


def _gate_of(rows: list[Row], key: str) -> Gate | None:
    """The gate with this key, as the first row has it that is not damaged."""
    return next((gate for row in rows for gate in row.gates if gate.key == key), None)
