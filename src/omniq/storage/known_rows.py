"""The rows that this storage object has claimed: what their outcomes make of them, without reading again.

While a claim is current, others may only cancel its task or attach documents to it. So its outcome can be
applied to the row as it was claimed, on the condition that neither has happened: by a plan for a fast
path if the row is plain, else by the rules (`Section.begin`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omniq.storage import row_rules
from omniq.storage.backend import Changes, DocumentChange, Ended
from omniq.storage.row_rules import Row
from omniq.storage.step import UNIQUE, EncodeFinish
from omniq.storage.types import Entry


class KnownRows:
    """The rows that this object has claimed and whose outcomes are not recorded yet."""

    def __init__(self) -> None:
        self._owner = ""
        self._rows: dict[str, Row] = {}

    def claimed(self, owner: str, entries: Iterable[Entry]) -> list[Row]:
        """The rows of these outcomes, as this owner has claimed them, as far as they are known."""
        known = self._rows if owner == self._owner else {}
        return [
            row
            for entry in entries
            if (row := known.get(entry.outcome.task_id)) is not None and _is_unchanged(row, entry)
        ]

    def plan(
        self, owner: str, entries: Sequence[Entry], now: int, encode_finish: EncodeFinish
    ) -> Changes | None:
        """The changes that outcomes of plain rows make; None when any of them needs the rules."""
        changes = Changes(ended=[], updated=[], documents=[])
        known = self._rows if owner == self._owner else {}
        if len({entry.outcome.task_id for entry in entries}) < len(entries):
            # Several outcomes of one task are recorded by the rules, in their order.
            return None
        for entry in entries:
            row = known.get(entry.outcome.task_id)
            if row is None or row.gates or not _is_unchanged(row, entry):
                return None
            # A copy: if the call fails, the known row must be unchanged.
            row = row_rules.copy_of(row)
            settled = row_rules.settle(row, entry.outcome, now)
            finish = settled.finish
            if settled.result is not None or (finish is not None and finish.dead is not None):
                return None
            if finish is None:
                changes.updated.append(row)
            else:
                encoded = encode_finish(finish, entry.result)
                finished = row_rules.finished_row(row, finish, encoded, now)
                changes.ended.append(Ended(finished))
                if row.unique:
                    holder = row.id.encode()
                    changes.documents.append(
                        DocumentChange(UNIQUE, row.unique, holder, None, if_equal=True)
                    )
        return changes

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


def _is_unchanged(row: Row, entry: Entry) -> bool:
    return row.token == entry.outcome.token and not (row.attached or row.watched)
