"""The rows that this storage object has claimed: what their outcomes make of them, without reading again.

While a claim is current, others may only cancel its task or attach documents to it. So the outcome of a
plain row can be planned from the row as it was claimed, and written on the condition that neither has
happened. All other outcomes are recorded by the rules, on rows that are read again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import msgspec

from omniq.storage import row_rules
from omniq.storage.backend import Changes, DocumentChange, Ended
from omniq.storage.row_rules import Row
from omniq.storage.step import UNIQUE, EncodeFinish
from omniq.storage.types import Entry


class Plan(msgspec.Struct):
    """The changes that outcomes make, and the positions of the outcomes that need the rules."""

    changes: Changes
    unplanned: list[int]


class KnownRows:
    """The rows that this object has claimed and whose outcomes are not recorded yet."""

    def __init__(self) -> None:
        self._owner = ""
        self._rows: dict[str, Row] = {}

    def plan(
        self, owner: str, entries: Sequence[Entry], now: int, encode_finish: EncodeFinish
    ) -> Plan:
        """Plan the outcomes of plain rows."""
        plan = Plan(Changes(ended=[], updated=[], documents=[]), [])
        known = self._rows if owner == self._owner else {}
        if len({entry.outcome.task_id for entry in entries}) < len(entries):
            # Several outcomes of one task are recorded by the rules, in their order.
            known = {}
        for number, entry in enumerate(entries):
            row = known.get(entry.outcome.task_id)
            if row is None or not _is_plain(row, entry):
                plan.unplanned.append(number)
                continue
            # A copy: if the call fails, the known row must be unchanged.
            row = copy.copy(row)
            settled = row_rules.settle(row, entry.outcome, now)
            finish = settled.finish
            if settled.result is not None or (finish is not None and finish.dead is not None):
                plan.unplanned.append(number)
                continue
            if finish is None:
                plan.changes.updated.append(row)
            else:
                encoded = encode_finish(finish, entry.result)
                finished = row_rules.finished_row(row, finish, encoded, now)
                plan.changes.ended.append(Ended(finished))
                if row.unique:
                    holder = row.id.encode()
                    plan.changes.documents.append(
                        DocumentChange(UNIQUE, row.unique, holder, None, if_equal=True)
                    )
        return plan

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


def _is_plain(row: Row, entry: Entry) -> bool:
    return row.token == entry.outcome.token and not (row.gates or row.attached or row.watched)
