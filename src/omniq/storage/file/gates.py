"""The shared state of running limits, rate limits and breakers: one cell for each key.

A task enters its gates after its claim's rename, and leaves them after its outcome's. So every holder
on record was running when it was written down, and one that is not any more can be dropped: what a
process that died forgot to leave heals by itself. Only a breaker's probe is given a while: its owner
tells the breaker what it came to when the outcome is there already.
"""

from __future__ import annotations

import copy
import hashlib

from omniq import gate_rules
from omniq.gate_rules import Effect, Gate, GateState
from omniq.storage.file.encoding import GATE
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_values import Cells, Version
from omniq.storage.file.task_files import Ledger

_State = tuple[str, GateState]

_PATIENCE = 1_000_000
"""Microseconds that a breaker waits for the word of a probe that has ended."""


class Gatekeeper:
    """Lets tasks in and out of their gates, `gates/<sha256 of the key>/`."""

    def __init__(self, disk: Disk, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cells = Cells(disk, "gates", GATE, lasting=False)
        self._known: dict[str, Version[_State]] = {}
        self._missed: dict[str, tuple[tuple[str, int], int]] = {}
        """Of breakers: the probe that runs no more and has not left, and since when that is known."""

    def states(self) -> dict[str, GateState]:
        """The state of every gate that was ever used, by key."""
        found = (self._cells.read(name) for name in self._cells.names())
        return {version.value[0]: version.value[1] for version in found if version is not None}

    def room(self, gate: Gate, now: int) -> int:
        """How many tasks the gate would let in."""
        return gate_rules.room(gate, self._healed(gate, now)[1], now)

    def known_room(self, gate: Gate, now: int) -> int:
        """The same by what this process last saw of the gate; asks nobody."""
        known = self._known.get(gate.key)
        state = GateState() if known is None else copy.deepcopy(known.value[1])
        self._heal(gate, state, now)
        return gate_rules.room(gate, state, now)

    def blocking(self, gates: tuple[Gate, ...], now: int) -> Gate | None:
        """The first gate that has no room now."""
        return next((gate for gate in gates if self.room(gate, now) == 0), None)

    def enter(self, gates: tuple[Gate, ...], task_id: str, token: int, now: int) -> Gate | None:
        """Let a claimed task in; the gate that has no room after all, and the task is in none."""
        entered: list[Gate] = []
        for gate in gates:
            if not self._enter(gate, task_id, token, now):
                self.leave(tuple(entered), task_id, token, "neither", now)
                return gate
            entered.append(gate)
        return None

    def _enter(self, gate: Gate, task_id: str, token: int, now: int) -> bool:
        while True:
            before, state = self._healed(gate, now)
            if gate_rules.room(gate, state, now) == 0:
                return False
            gate_rules.enter(gate, state, task_id, token, now)
            if self._swap(gate, before, state):
                return True

    def leave(
        self,
        gates: tuple[Gate, ...],
        task_id: str,
        token: int,
        effect: Effect,
        now: int,
        reason: str = "",
    ) -> None:
        """Count the task as gone from all its gates."""
        for gate in gates:
            while True:
                before, state = self._read(gate)
                was = copy.deepcopy(state)
                gate_rules.leave(gate, state, task_id, token, effect, now, reason)
                if state == was or self._swap(gate, before, state):
                    break

    def _healed(self, gate: Gate, now: int) -> tuple[Version[_State] | None, GateState]:
        """The gate's state, without holders that do not run any more."""
        before, state = self._read(gate)
        if not all(self._is_running(holder) for holder in state.holders):
            # The index may be behind. The cell was read first, so the claim has been told by now.
            self._ledger.refresh()
            self._heal(gate, state, now)
        return before, state

    def _heal(self, gate: Gate, state: GateState, now: int) -> None:
        for holder in [each for each in state.holders if not self._is_running(each)]:
            if gate.kind != "breaker" or self._is_overdue(gate.key, holder, now):
                gate_rules.leave(gate, state, *holder, "neither", now)

    def _is_overdue(self, key: str, probe: tuple[str, int], now: int) -> bool:
        missed, since = self._missed.get(key, (probe, now))
        if missed != probe or since > now:
            since = now
        self._missed[key] = (probe, since)
        return now - since >= _PATIENCE

    def _is_running(self, holder: tuple[str, int]) -> bool:
        claimed = self._ledger.index.running.get(holder[0])
        return claimed is not None and claimed.token == holder[1]

    def _read(self, gate: Gate) -> tuple[Version[_State] | None, GateState]:
        name = _name_of(gate.key)
        known = self._known.get(gate.key)
        if known is None or not self._cells.is_current(name, known.number):
            known = self._cells.read(name)
            if known is not None:
                self._known[gate.key] = known
        return known, GateState() if known is None else copy.deepcopy(known.value[1])

    def _swap(self, gate: Gate, before: Version[_State] | None, state: GateState) -> bool:
        after = self._cells.swap(_name_of(gate.key), before, (gate.key, state))
        if after is None:
            self._known.pop(gate.key, None)
            return False
        self._known[gate.key] = after
        return True


def _name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
