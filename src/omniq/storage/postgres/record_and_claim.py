"""Record and claim: the fast path, one SQL function that does both in one round trip.

Python computes beforehand what each outcome makes of its task, from the row as it was claimed. The
SQL function `turn` (`sql/functions/4_record_and_claim.sql`) writes that if the row has not changed,
and claims ordinary tasks. What it cannot do is left to the rule path (`record`, `claim`).
"""

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

_SUCCESS = encoding.STATUS_NUMBERS[TaskStatus.SUCCESS]

DONE = 0
"""Everything was recorded and claimed."""

OUTCOMES_NOT_MATCHED = 1
"""Some rows had changed: their outcomes need the rule path. Nothing was claimed."""

LEASE_LOST = 2
"""The owner has no lease. Nothing was done."""

CLAIM_NEEDS_RULES = 3
"""All outcomes were recorded. The claim needs the rule path; nothing was claimed."""

MORE_DUE = 4
"""All outcomes were recorded. More tasks have become due than one call moves: call again."""

_PLACEHOLDERS = ", ".join(f"${number}" for number in range(1, 21))
RECORD_AND_CLAIM = f"SELECT * FROM {{schema}}.turn({_PLACEHOLDERS})"
RECORD_AND_CLAIM_POOLED = f"SELECT * FROM {{schema}}.turn_pooled({_PLACEHOLDERS})"


class RecordPlan(msgspec.Struct, frozen=True):
    """The new states of tasks, valid if their rows are as they were when claimed.

    One tuple for each task: parameters 3 to 6 of `RECORD_AND_CLAIM` for those that have ended, 7
    to 15 for the others.
    """

    ended: list[tuple[Any, ...]] = []
    changed: list[tuple[Any, ...]] = []


def plan_outcomes(
    entries: Sequence[Entry], known: Mapping[str, Row], now: int, encode_finish: EncodeFinish
) -> RecordPlan | None:
    """Compute the new states of these outcomes' tasks; None when one of them needs the rule path."""
    plan = RecordPlan([], [])
    seen: set[str] = set()
    for entry in entries:
        outcome = entry.outcome
        row = known.get(outcome.task_id)
        if row is None or row.gates or row.token != outcome.token or row.id in seen:
            return None
        seen.add(row.id)
        if type(outcome) is Succeeded and outcome.next_eta is None and entry.result is not None:
            # Most tasks take this branch; it has the same effect as `settle` below.
            plan.ended.append((row.id, outcome.token, _SUCCESS, entry.result))
            continue
        # A copy: if this call fails, the known row must be unchanged.
        row = msgspec.structs.replace(row)
        settled = row_rules.settle(row, outcome, now)
        finish = settled.finish
        if settled.result is not None or (finish is not None and finish.dead is not None):
            return None
        if finish is not None:
            result = encode_finish(finish, entry.result)
            status = encoding.STATUS_NUMBERS[finish.status]
            plan.ended.append((row.id, outcome.token, status, result))
        else:
            plan.changed.append(
                (
                    row.id, outcome.token, encoding.STATUS_NUMBERS[row.status], row.attempts,
                    row.releases, row.due, row.visible, row.owner is not None,
                    encoding.encode_history(row),
                )
            )  # fmt: skip
    return plan


def parameters(
    owner: str, now: int | None, plan: RecordPlan, claim: Claim | None, *, is_repeat: bool
) -> list[Any]:
    """The parameters of `RECORD_AND_CLAIM`."""
    request: list[Any] = [0, None, None, None]
    if claim is not None:
        queues = None if claim.queues is None else list(claim.queues)
        request = [claim.limit, claim.now, queues, claim.claim_id]
    return [
        owner,
        now,
        *encoding.to_columns(plan.ended, 4),
        *encoding.to_columns(plan.changed, 9),
        *request,
        is_repeat,
    ]


class Reply(msgspec.Struct, frozen=True):
    """The reply of the SQL function. `missed` are the ids of outcomes that did not match."""

    state: int
    at: int
    next_due: int | None = None
    missed: frozenset[str] = frozenset()
    rows: list[Row] = []


def read_reply(records: Sequence[Sequence[Any]], owner: str) -> Reply:
    """Decode the returned lines: the first has the state, the others the claimed rows."""
    state, missed, at, next_due, *_ = records[0]
    rows = [encoding.claimed_row(record, owner) for record in records[1:]]
    rows.sort(key=_order)
    return Reply(state, at, next_due, frozenset(missed or ()), rows)


def _order(row: Row) -> tuple[int, int, int]:
    return row.order


class KnownRows:
    """Rows that this object has claimed and not recorded yet, as they were when claimed.

    While a claim is current, others may only cancel the task or attach side data to it.
    """

    def __init__(self) -> None:
        self._owner = ""
        self._rows: dict[str, Row] = {}

    def of(self, owner: str) -> Mapping[str, Row]:
        """The rows claimed by this owner."""
        return self._rows if owner == self._owner else {}

    def update(self, owner: str, entries: Iterable[Entry], claimed: Iterable[Row]) -> None:
        """Remove the rows whose outcomes were recorded, and add those that were claimed."""
        if owner != self._owner:
            # The tasks of an earlier owner have been given back.
            self._owner, self._rows = owner, {}
        for entry in entries:
            row = self._rows.get(entry.outcome.task_id)
            # A concurrent call may have claimed the task again before this one returned.
            if row is not None and row.token == entry.outcome.token:
                del self._rows[row.id]
        for row in claimed:
            self._rows[row.id] = row

    def remove(self, owner: str, task_id: str) -> None:
        """Remove the row of a task whose claim has ended."""
        if owner == self._owner:
            self._rows.pop(task_id, None)
