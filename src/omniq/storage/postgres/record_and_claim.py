"""A worker's turn in one round trip: what Python works out beforehand, and what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from omniq.models import TaskStatus
from omniq.outcomes import Succeeded
from omniq.storage import row_rules
from omniq.storage.postgres import encoding
from omniq.storage.postgres.record import EncodeFinish
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim, Entry

_SUCCESS = encoding.NUMBERS[TaskStatus.SUCCESS]

DONE, MISSED, LOST, SLOW, PARTIAL = range(5)
"""What `turn` says it came to: see turn.sql."""

_PLACES = ", ".join(f"${number}" for number in range(1, 21))
TURN = f"SELECT * FROM {{schema}}.turn({_PLACES})"
TURN_POOLED = f"SELECT * FROM {{schema}}.turn_pooled({_PLACES})"


class Plan(msgspec.Struct, frozen=True):
    """What a batch of outcomes makes of its tasks, if they are as they were when claimed."""

    ended: list[tuple[Any, ...]] = []
    changed: list[tuple[Any, ...]] = []


def plan(
    entries: Sequence[Entry], known: Mapping[str, Row], now: int, encode_finish: EncodeFinish
) -> Plan | None:
    """The plan for these outcomes; None when one of them needs the slower transaction."""
    made = Plan([], [])
    seen: set[str] = set()
    for entry in entries:
        outcome = entry.outcome
        row = known.get(outcome.task_id)
        if row is None or row.gates or row.token != outcome.token or row.id in seen:
            return None
        seen.add(row.id)
        if type(outcome) is Succeeded and outcome.next_eta is None and entry.result is not None:
            # Most tasks, and all that the rules would make of them.
            made.ended.append((row.id, outcome.token, _SUCCESS, entry.result))
            continue
        # A copy: when this turn fails, what is known must still be true.
        row = msgspec.structs.replace(row)
        settled = row_rules.settle(row, outcome, now)
        finish = settled.finish
        if settled.result is not None or (finish is not None and finish.dead is not None):
            return None
        if finish is not None:
            result = encode_finish(finish, entry.result)
            made.ended.append((row.id, outcome.token, encoding.NUMBERS[finish.status], result))
        else:
            made.changed.append(
                (
                    row.id, outcome.token, encoding.NUMBERS[row.status], row.attempts, row.releases,
                    row.due, row.visible, row.owner is not None, encoding.history_of(row),
                )
            )  # fmt: skip
    return made


def parameters(
    owner: str, now: int | None, made: Plan, claim: Claim | None, *, is_repeat: bool
) -> list[Any]:
    """The parameters of `TURN`."""
    request: list[Any] = [0, None, None, None]
    if claim is not None:
        queues = None if claim.queues is None else list(claim.queues)
        request = [claim.limit, claim.now, queues, claim.claim_id]
    return [
        owner,
        now,
        *encoding.columns(made.ended, 4),
        *encoding.columns(made.changed, 9),
        *request,
        is_repeat,
    ]


class Answer(msgspec.Struct, frozen=True):
    """What a turn came to. `rows` are those claimed, in order."""

    state: int
    at: int
    next_due: int | None = None
    missed: frozenset[str] = frozenset()
    rows: list[Row] = []


def answer_of(records: Sequence[Sequence[Any]], owner: str) -> Answer:
    """The lines that `turn` returned: first its state, then what was claimed."""
    state, missed, at, next_due, *_ = records[0]
    rows = [encoding.claimed_of(record, owner) for record in records[1:]]
    rows.sort(key=_order)
    return Answer(state, at, next_due, frozenset(missed or ()), rows)


def _order(row: Row) -> tuple[int, int, int]:
    return row.order


class KnownRows:
    """The rows this object has claimed and not recorded yet, as they were when they were claimed.

    Nobody else changes a row while its claim is current, but to cancel it or to attach something.
    """

    def __init__(self) -> None:
        self._owner = ""
        self._rows: dict[str, Row] = {}

    def of(self, owner: str) -> Mapping[str, Row]:
        """Those of this owner."""
        return self._rows if owner == self._owner else {}

    def update(self, owner: str, entries: Iterable[Entry], claimed: Iterable[Row]) -> None:
        """Forget what was recorded, keep what was claimed."""
        if owner != self._owner:
            # What a former owner held has been given back.
            self._owner, self._rows = owner, {}
        for entry in entries:
            row = self._rows.get(entry.outcome.task_id)
            # Another turn may have claimed the task anew before this one came back.
            if row is not None and row.token == entry.outcome.token:
                del self._rows[row.id]
        for row in claimed:
            self._rows[row.id] = row

    def forget(self, owner: str, task_id: str) -> None:
        """The claim on the task has ended."""
        if owner == self._owner:
            self._rows.pop(task_id, None)
