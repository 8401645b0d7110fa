"""The model's turns: which place in line a task with a `fair` key gets, found by trying one instant after the other.

All shares must make steps that are multiples of `UNIT`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omniq.testing.clock import ManualClock

if TYPE_CHECKING:
    from omniq.testing.model_tasks import Record

UNIT = 250_000
_ROUND = 1_000_000
_FORGOTTEN_AFTER = 600_000_000
_BEFORE_THE_LINE = 10**16


@dataclass
class _Line:
    """The front of a line as it was last stored, when it is looked at again, and the units that each key has taken."""

    front: int
    due: int
    taken: dict[str, set[int]] = field(default_factory=dict)


class ModelTurns:
    """The lines of all queues and priorities."""

    def __init__(self, clock: ManualClock, live: dict[str, Record]) -> None:
        self._clock = clock
        self._live = live
        self._lines: dict[tuple[str, int], _Line] = {}

    def give(self, record: Record) -> None:
        """Give a task its place in line, if it has a `fair` key."""
        fair = record.task.fair
        if fair is None:
            return
        line, instant = self._look(record.line)
        taken = line.taken.setdefault(fair.key, set())
        units = missing = round(_ROUND * fair.cost / fair.weight) // UNIT
        while missing:
            if instant not in taken:
                taken.add(instant)
                missing -= 1
            instant += UNIT
        # It ends with the last of its units, wherever the first are.
        record.turn, record.keeps_turn = instant - units * UNIT, False

    def free(self, record: Record) -> None:
        """Give back the place of a task that leaves the line without a run."""
        fair, line = record.task.fair, self._lines.get(record.line)
        if fair is None or line is None or record.turn is None or not record.is_in_line:
            return
        units = round(_ROUND * fair.cost / fair.weight) // UNIT
        for number in range(units):
            line.taken.get(fair.key, set()).discard(record.turn + number * UNIT)

    def _look(self, name: tuple[str, int]) -> tuple[_Line, int]:
        """The line, and where its front is."""
        now, line, waiting = self._clock.micros(), self._lines.get(name), self._waiting(name)
        first = min(waiting, key=order_of, default=None)
        if line is None or first is None:
            front = now if line is None else max(line.front, now)
            if line is None and first is not None and first.is_in_line and first.turn is not None:
                front = first.turn
            line = self._lines[name] = _Line(front, now + _FORGOTTEN_AFTER)
            return line, front
        front = line.front
        if first.is_in_line and first.turn is not None:
            front = max(front, first.turn)
        if front - line.front >= 8 * _ROUND:
            line.front, line.due = front, now + _FORGOTTEN_AFTER
        return line, front

    def _waiting(self, name: tuple[str, int]) -> list[Record]:
        now = self._clock.micros()
        return [
            record
            for record in self._live.values()
            if record.line == name
            and record.owner is None
            and record.not_before <= now
            and not record.crashes
            and (record.is_in_line or record.task.fair is None)
        ]

    def forget_old(self) -> None:
        """Forget lines that are empty, and that nothing was written of for a while."""
        now = self._clock.micros()
        for name, line in list(self._lines.items()):
            if line.due <= now and not self._waiting(name):
                del self._lines[name]
            elif line.due <= now:
                line.due = now + _FORGOTTEN_AFTER


def order_of(record: Record) -> tuple[int, int, int]:
    """A key that sorts tasks in the order in which they are claimed."""
    task, turn = record.task, record.due
    if task.ageing is not None:
        return (0, turn - round(task.ageing * _ROUND) * task.priority, record.number)
    if task.fair is not None:
        if record.turn is None:
            turn = max(0, min(record.due, _BEFORE_THE_LINE - 1)) - _BEFORE_THE_LINE
        else:
            turn = record.turn - _BEFORE_THE_LINE if record.keeps_turn else record.turn
    return (-task.priority, turn, record.number)
