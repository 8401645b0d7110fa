"""Claim: which rows an owner gets, in which order, and what becomes of those that it may not have."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

import msgspec

from omniq.storage import row_rules
from omniq.storage.backend import DocumentQuery, Order, Wanted
from omniq.storage.pauses import PAUSED_QUEUE, without_paused
from omniq.storage.row_rules import Row
from omniq.storage.step import Step
from omniq.storage.types import Claim

MAX_MOVES = 1_000
"""Rows that one step parks, offers or expires, about; then it writes, and another step goes on."""

_LARGEST_PAGE = 500

_order = attrgetter("order")


class Claimed(msgspec.Struct):
    """What a step claimed. `is_partial`: it made as many moves as it may, so another step goes on.

    `has_released`: rows have become claimable that waited for others. `went_back`: it did nothing, because a row has a
    lower token than this owner was given for it. `is_missing`: it did nothing, because a row is missing that this
    owner holds, unless the row was taken from it.
    """

    rows: list[Row] = []
    expired: list[str] = []
    is_partial: bool = False
    has_released: bool = False
    went_back: bool = False
    is_missing: bool = False


class Claimer:
    """Claims rows for one owner in one step."""

    def __init__(self, step: Step, owner: str, claim: Claim, wanted: Wanted) -> None:
        self._step = step
        self._owner = owner
        self._limit = claim.limit
        self._wanted = wanted
        self._claimed = Claimed()
        self._moves = 0
        self._returned: list[Row] = []

    async def claim(self) -> Claimed:
        """Claim the first rows that are due, wanted, and admitted by their gates."""
        self._claimed.is_partial = await self._step.gates.wake(self._wanted.due_by)
        self._add(await self._released())
        after: Order | None = None
        is_last, size = False, 0
        while not self._is_done():
            self._add(await self._step.offer())
            page: list[Row] = []
            if not is_last:
                # Growing pages, because a page may consist of rows that one gate blocks.
                missing = self._limit - len(self._claimed.rows) - len(self._returned)
                size = min(max(missing, 2 * size, 1), _LARGEST_PAGE)
                page = await self._step.section.candidates(self._wanted, after, size)
                is_last = len(page) < size
                after = page[-1].order if page else after
                page = self._step.without_changed(page)
            elif not self._returned:
                return self._claimed
            rows = self._merged(page, None if is_last else after)
            await self._step.gates.load(rows)
            self._take(rows)
        return self._claimed

    def _is_done(self) -> bool:
        if len(self._claimed.rows) == self._limit:
            return True
        if self._moves >= MAX_MOVES:
            self._claimed.is_partial = True
            return True
        return False

    async def _released(self) -> list[Row]:
        """The rows that outcomes of this very step have returned to the ready order."""
        released = [row for row in self._step.waiting if row.visible <= self._wanted.due_by]
        # A row that this object has claimed itself has its body.
        without_body = {row.id: row for row in released if not row.body}
        if without_body:
            found = await self._step.section.load(list(without_body), bodies=True)
            for task_id, row in without_body.items():
                row.body = found[task_id].row.body
        return released

    def _add(self, rows: list[Row]) -> None:
        """Add rows that return to the ready order in this step: no page has them."""
        self._moves += len(rows)
        self._returned += [row for row in rows if self._wanted.accepts(row)]

    def _merged(self, page: list[Row], last: Order | None) -> list[Row]:
        """The page and the returned rows up to `last`, in claim order."""
        if not self._returned:
            return page
        rows = sorted([*page, *self._returned], key=_order)
        end = len(rows) if last is None else bisect_right(rows, last, key=_order)
        self._returned = rows[end:]
        return rows[:end]

    def _take(self, rows: list[Row]) -> None:
        step, claimed, due_by = self._step, self._claimed, self._wanted.due_by
        refills = step.gates.refills
        for position, row in enumerate(rows):
            if len(claimed.rows) == self._limit:
                break
            if refills:
                # A row that another gate offers now may sort before the next one.
                self._returned += rows[position:]
                break
            if row.crashes and not self._wanted.suspects:
                continue
            if row.workflow is not None and not row_rules.may_run(row):
                self._pass_over(row)
            elif row.expires is not None and row_rules.is_expired(row, due_by):
                step.finish(row, row_rules.finish_cancelled(row, step.now, "expired"))
                claimed.expired.append(row.id)
                self._moves += 1
            elif row.gates and not step.gates.enter(row):
                if row.parked is not None:
                    step.move(row)
                self._moves += 1
            else:
                step.claim(row, self._owner)
                claimed.rows.append(row)
                if row.crashes:
                    self._wanted = msgspec.structs.replace(self._wanted, suspects=False)

    def _pass_over(self, row: Row) -> None:
        """A row that waits for others is not claimed; it ends if it expires meanwhile."""
        if row_rules.is_expired(row, self._wanted.due_by):
            finish = row_rules.finish_cancelled(row, self._step.now, "expired")
            self._step.finish(row, finish)
            self._claimed.expired.append(row.id)
        self._moves += 1


async def wanted_by(step: Step, owner: str, claim: Claim) -> Wanted:
    """The rows that the claim may take: none that are paused, and one suspect for an owner at most."""
    found = await step.section.find_documents(DocumentQuery(kind=PAUSED_QUEUE))
    paused = frozenset(document.key for document in found)
    return Wanted(
        due_by=step.now if claim.now is None else claim.now,
        queues=claim.queues,
        paused=paused,
        runnable=without_paused(claim.runnable, paused),
        suspects=not await step.holds_suspect(owner),
    )
