"""Gates: the state of running limits, rate limits and breakers, one shared value for each key.

A task enters its gates after the rename that claims it, and leaves them after the rename that
records its outcome. So every stored holder was running when it was stored, and a holder that no
longer runs can be removed: this repairs the gates of a process that died before it left them. A
breaker's probe is removed only after a delay, because its owner reports the outcome to the breaker
after recording it.
"""

from __future__ import annotations

import copy
import hashlib

from omniq import gate_rules
from omniq.gate_rules import Effect, Gate, GateState
from omniq.storage.file.encoding import GATE
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_values import SharedValues, Version
from omniq.storage.file.task_files import TaskFiles

_State = tuple[str, GateState]

_PROBE_GRACE = 1_000_000
"""Microseconds that a breaker waits for the outcome of a probe that has ended."""


class Gates:
    """Lets tasks enter and leave their gates, `gates/<sha256 of the key>/`."""

    def __init__(self, disk: Disk, task_files: TaskFiles) -> None:
        self._task_files = task_files
        self._values = SharedValues(disk, "gates", GATE, durable=False)
        self._known: dict[str, Version[_State]] = {}
        self._ended_probes: dict[str, tuple[tuple[str, int], int]] = {}
        """By breaker: a probe that has ended without leaving, and when this was first noticed."""

    def states(self) -> dict[str, GateState]:
        """The state of every gate that was ever used, by key."""
        found = (self._values.read(name) for name in self._values.names())
        return {version.value[0]: version.value[1] for version in found if version is not None}

    def room(self, gate: Gate, now: int) -> int:
        """The number of tasks that may enter the gate now."""
        return gate_rules.room(gate, self._read_repaired(gate, now)[1], now)

    def known_room(self, gate: Gate, now: int) -> int:
        """The same by the state that this process read last; reads no file."""
        known = self._known.get(gate.key)
        state = GateState() if known is None else copy.deepcopy(known.value[1])
        self._remove_ended(gate, state, now)
        return gate_rules.room(gate, state, now)

    def blocking(self, gates: tuple[Gate, ...], now: int) -> Gate | None:
        """The first gate that has no room now."""
        return next((gate for gate in gates if self.room(gate, now) == 0), None)

    def enter(self, gates: tuple[Gate, ...], task_id: str, token: int, now: int) -> Gate | None:
        """Enter all gates of a claimed task.

        Returns None, or the gate that has no room any more; then the task is in none of them.
        """
        entered: list[Gate] = []
        for gate in gates:
            if not self._enter(gate, task_id, token, now):
                self.leave(tuple(entered), task_id, token, "neither", now)
                return gate
            entered.append(gate)
        return None

    def _enter(self, gate: Gate, task_id: str, token: int, now: int) -> bool:
        while True:
            before, state = self._read_repaired(gate, now)
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
        """Remove the task from all its gates, and report its effect to them."""
        for gate in gates:
            while True:
                before, state = self._read(gate)
                was = copy.deepcopy(state)
                gate_rules.leave(gate, state, task_id, token, effect, now, reason)
                if state == was or self._swap(gate, before, state):
                    break

    def _read_repaired(self, gate: Gate, now: int) -> tuple[Version[_State] | None, GateState]:
        """Read the gate's state, and remove holders that no longer run."""
        before, state = self._read(gate)
        if not all(self._is_running(holder) for holder in state.holders):
            # The index may be out of date. The state was read first, so its claims are visible now.
            self._task_files.refresh()
            self._remove_ended(gate, state, now)
        return before, state

    def _remove_ended(self, gate: Gate, state: GateState, now: int) -> None:
        for holder in [each for each in state.holders if not self._is_running(each)]:
            if gate.kind != "breaker" or self._is_overdue(gate.key, holder, now):
                gate_rules.leave(gate, state, *holder, "neither", now)

    def _is_overdue(self, key: str, probe: tuple[str, int], now: int) -> bool:
        known, since = self._ended_probes.get(key, (probe, now))
        if known != probe or since > now:
            since = now
        self._ended_probes[key] = (probe, since)
        return now - since >= _PROBE_GRACE

    def _is_running(self, holder: tuple[str, int]) -> bool:
        claimed = self._task_files.index.running.get(holder[0])
        return claimed is not None and claimed.token == holder[1]

    def _read(self, gate: Gate) -> tuple[Version[_State] | None, GateState]:
        name = _name_of(gate.key)
        known = self._known.get(gate.key)
        if known is None or not self._values.is_current(name, known.number):
            known = self._values.read(name)
            if known is not None:
                self._known[gate.key] = known
        return known, GateState() if known is None else copy.deepcopy(known.value[1])

    def _swap(self, gate: Gate, before: Version[_State] | None, state: GateState) -> bool:
        after = self._values.swap(_name_of(gate.key), before, (gate.key, state))
        if after is None:
            self._known.pop(gate.key, None)
            return False
        self._known[gate.key] = after
        return True


def _name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
