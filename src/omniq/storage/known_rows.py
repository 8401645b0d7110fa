"""The rows that this storage object has claimed: what their outcomes make of them, without reading again.

While a claim is current, others may only cancel its task, or attach documents or waiting tasks to it. So its outcome can be
applied to the row as it was claimed, on the condition that neither has happened: by a plan for a fast
path if the row is plain, else by the rules (`Section.begin`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from omniq.outcomes import Outcome, Released, Suspended
from omniq.storage import row_rules
from omniq.storage.backend import Changes, Ended
from omniq.storage.row_rules import Row
from omniq.storage.step import EncodeFinish, release_unique_key


class KnownRows:
    """The rows that this object has claimed and whose outcomes are not recorded yet."""

    def __init__(self) -> None:
        self._owner = ""
        self._rows: dict[str, Row] = {}
        self._attached: dict[str, int] = {}
        """The tokens of the rows whose outcomes are decided by what is stored beside them."""
        self._sent: dict[int, Sequence[Outcome]] = {}
        self._doubtful: set[tuple[str, int]] = set()
        """Claims of which a call without a reply may have recorded the outcome."""

    def claimed(self, owner: str, outcomes: Iterable[Outcome]) -> list[Row]:
        """The rows of these outcomes, as this owner has claimed them, as far as they are known."""
        known = self._rows if owner == self._owner else {}
        return [
            row
            for outcome in outcomes
            if (row := known.get(outcome.task_id)) is not None and row.token == outcome.token
        ]

    def is_certain(
        self, owner: str, task_id: str, token: int, within: Sequence[Outcome] = ()
    ) -> bool:
        """Whether the store has the row, unless it went back or others have taken the row from this owner.

        So it is while no outcome of this claim was sent, except `within` the call that asks.
        """
        if owner != self._owner or (task_id, token) in self._doubtful:
            return False
        row = self._rows.get(task_id)
        if token != (self._attached.get(task_id) if row is None else row.token):
            return False
        return not any(
            each.task_id == task_id
            for outcomes in self._sent.values()
            if outcomes is not within
            for each in outcomes
        )

    def send(self, outcomes: Sequence[Outcome]) -> None:
        """Note that a call is to record these outcomes; `update` or `doubt` ends it."""
        if outcomes:
            self._sent[id(outcomes)] = outcomes

    def doubt(self, outcomes: Sequence[Outcome]) -> None:
        """Note outcomes that may have been recorded by a call that has no reply."""
        self._sent.pop(id(outcomes), None)
        self._doubtful.update((outcome.task_id, outcome.token) for outcome in outcomes)

    def plan(
        self,
        owner: str,
        outcomes: Sequence[Outcome],
        now: int,
        encode_finish: EncodeFinish,
        gate_kinds: Collection[str] = (),
    ) -> Changes | None:
        """The changes that outcomes make; None when any of them needs the rules.

        Those of plain rows do not, and of rows that have only gates of these kinds, of which they take one unit.
        """
        changes = Changes(ended=[], updated=[], documents=[])
        known = self._rows if owner == self._owner else {}
        if len({outcome.task_id for outcome in outcomes}) < len(outcomes):
            # Several outcomes of one task are recorded by the rules, in their order.
            return None
        for outcome in outcomes:
            row = known.get(outcome.task_id)
            if row is None or row.token != outcome.token:
                return None
            if row.workflow is not None or isinstance(outcome, Suspended | Released):
                # The rules notify waiting workers of a released task, which may run now.
                return None
            if row.gates and not all(
                gate.kind in gate_kinds and gate.cost == 1 for gate in row.gates
            ):
                return None
            # A copy: if the call fails, the known row must be unchanged.
            row = row_rules.copy_of(row)
            settled = row_rules.settle(row, outcome, now)
            finish = settled.finish
            if finish is None:
                if settled.result is not None or settled.failure is not None:
                    return None
                changes.updated.append(row)
            elif finish.dead is not None:
                return None
            else:
                encoded = finish.encoded or encode_finish(finish)
                finished = row_rules.finished_row(row, finish, encoded, now)
                changes.ended.append(Ended(finished))
                if row.unique:
                    changes.documents += release_unique_key(row, now)
        return changes

    def update(self, owner: str, outcomes: Sequence[Outcome], claimed: Sequence[Row]) -> None:
        """Remove the rows whose outcomes were recorded, and add those that were claimed."""
        if owner != self._owner:
            # The tasks of an earlier owner have been given back.
            self._owner, self._rows = owner, {}
            self._attached, self._doubtful = {}, set()
        self._sent.pop(id(outcomes), None)
        if self._attached or self._doubtful:
            self._forget(outcomes)
        rows = self._rows
        for outcome in outcomes:
            row = rows.get(outcome.task_id)
            # A concurrent call may have claimed the task again before this one returned.
            if row is not None and row.token == outcome.token:
                del rows[outcome.task_id]
        # The outcomes of all others are decided by what is stored beside their rows.
        known = {row.id: row for row in claimed if not row.attached}
        rows.update(known)
        if len(known) < len(claimed):
            self._attached.update({row.id: row.token for row in claimed if row.attached})

    def _forget(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._doubtful.discard((outcome.task_id, outcome.token))
            if self._attached.get(outcome.task_id) == outcome.token:
                del self._attached[outcome.task_id]
