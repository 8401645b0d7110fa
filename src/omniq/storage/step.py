"""One atomic step of the engine: the rows it has read, and what becomes of them.

A step collects changes in memory and writes all of them at its end. The rules are those of
`row_rules` and `gate_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from omniq.clock import from_micros
from omniq.models import TaskStatus
from omniq.outcomes import Outcome, Released, Rescheduled, Suspended
from omniq.storage import row_rules
from omniq.storage.backend import ANY, Changes, DocumentChange, Ended, Record, Section
from omniq.storage.fairness import Places
from omniq.storage.gate_states import GateStates
from omniq.storage.release_dependents import Ends
from omniq.storage.row_rules import Finish, Row, Settled
from omniq.storage.row_seals import RowSeals
from omniq.storage.stored_output import cleared_output

EncodeFinish = Callable[[Finish], bytes]
"""Encodes the result of a task that has ended, unless its outcome contained it."""

PendHook = Callable[[Row, Finish, int], DocumentChange | None]
"""What records that the `on_dead` hook of a new dead letter is to be called; None if it has no hook."""

UNIQUE, CHECKPOINT, PROGRESS, NEWEST = "unique", "checkpoint", "progress", "newest"
"""Kinds of documents that belong to a task."""


class Step:
    """Changes to rows inside one section."""

    def __init__(
        self,
        section: Section,
        encode_finish: EncodeFinish,
        seals: RowSeals | None,
        pend_hook: PendHook,
        note_work: Callable[[], None],
    ) -> None:
        """`note_work` is called when the step leaves something to do to others."""
        self.section = section
        self.now = section.now
        self.changes = Changes()
        self.gates = GateStates(section)
        self._note_work = note_work
        self._ends: Ends | None = None
        self._places: Places | None = None
        self.behind: list[Row] = []
        """Rows with a lower token than an outcome: they were enqueued again, or the store went back."""
        self.missing: list[Outcome] = []
        """Outcomes of which the store has neither the task nor a record of its end."""
        self._encode_finish = encode_finish
        self._seals = seals
        self._pend_hook = pend_hook
        self._live: dict[str, Row] = {}
        self._updated: dict[str, Row] = {}
        self._moved: set[str] = set()
        """The ids of rows of which only `parked` has changed."""
        self._ended: dict[str, Ended] = {}
        self._changed: set[str] = set()
        self._has_claimed_workflow = False

    @property
    def ends(self) -> Ends:
        """The effects of ends on other records. Made late: a step without workflows does not need it."""
        if self._ends is None:
            self._ends = Ends(self, self._note_work)
        return self._ends

    @property
    def places(self) -> Places:
        """The places in line that the step gives and frees. Made late, as `ends`."""
        if self._places is None:
            self._places = Places(self.section, lambda: self.waiting)
        return self._places

    @property
    def has_released(self) -> bool:
        """Whether records of workflows have become claimable."""
        return self._ends is not None and self._ends.has_released

    @property
    def has_ended(self) -> bool:
        """Whether records of workflows have ended."""
        return self._ends is not None and self._ends.has_ended

    async def apply_ends(self) -> None:
        """Apply the effects that the ends of records have on others."""
        if self._ends is not None:
            await self._ends.apply()

    # Reading

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        """Read what is stored under these ids, and the gates of live tasks."""
        found = await self.section.load(ids, bodies=bodies)
        await self.add([record.row for record in found.values() if record.is_live])
        return found

    async def held_by(self, owner: str) -> list[Row]:
        """Read all rows that an owner holds, and their gates."""
        rows = await self.section.held([owner])
        await self.add(rows)
        return rows

    async def add(self, rows: Sequence[Row]) -> None:
        """Use rows that are as the store has them, and read their gates."""
        self._live.update({row.id: row for row in rows})
        await self.gates.load(rows)

    async def read(self, ids: Iterable[str]) -> dict[str, TaskStatus]:
        """Read the rows of these tasks that were not read yet; returns how those ended that have ended."""
        wanted = list(dict.fromkeys(ids))
        unread = [each for each in wanted if each not in self._live and each not in self._ended]
        found = await self.load(unread) if unread else {}
        statuses = {
            task_id: TaskStatus.FAILED if record.finished is None else record.newest_row.status
            for task_id, record in found.items()
            if not record.is_live
        }
        for task_id in wanted:
            if task_id in self._ended:
                statuses[task_id] = self._ended[task_id].row.status
        return statuses

    def live(self, task_id: str) -> Row | None:
        """Return a row that was read and has not ended, or None."""
        return self._live.get(task_id)

    def is_dead(self, task_id: str) -> bool:
        """Whether the row became a dead letter in this step."""
        ended = self._ended.get(task_id)
        return ended is not None and ended.letter is not None

    async def holds_suspect(self, owner: str) -> bool:
        """Whether the owner holds a suspect, after the outcomes of this step."""
        for row in await self.section.held([owner], only_suspects=True):
            changed = self._updated.get(row.id, row)
            if row.id not in self._ended and changed.owner == owner:
                return True
        return False

    # Outcomes

    async def record(self, owner: str, outcomes: Sequence[Outcome]) -> list[bool]:
        """Apply the outcomes whose claims are current; for each, whether it is recorded."""
        unread = [each.task_id for each in outcomes if each.task_id not in self._live]
        found = await self.load(unread) if unread else {}
        return [self._record(owner, outcome, found) for outcome in outcomes]

    def _record(self, owner: str, outcome: Outcome, found: dict[str, Record]) -> bool:
        row = self._live.get(outcome.task_id)
        if row is None:
            return self._was_recorded(outcome, found.get(outcome.task_id))
        token = row.token
        # Most are; the function knows the other case.
        is_current = token == outcome.token and row.owner == owner
        if not (is_current or row_rules.is_current(row, outcome, owner)):
            if token < outcome.token:
                self.behind.append(row)
            return row_rules.was_recorded(row, outcome)
        if row.workflow is not None:
            # A wait that has ended at its deadline.
            row_rules.discard_wait(row)
        settled = row_rules.settle(row, outcome, self.now)
        self.settle(row, token, settled)
        if settled.finish is None and isinstance(outcome, Suspended):
            self.suspend(row)
        return True

    def suspend(self, row: Row) -> None:
        """Have a row that is suspended wait for what it says."""
        assert row.workflow is not None
        row.attached = True
        if row.workflow.on:
            self.ends.begin_wait(row, row.workflow.on)
        if not row_rules.is_waiting(row):
            row_rules.make_claimable(row, self.now)

    def _was_recorded(self, outcome: Outcome, record: Record | None) -> bool:
        ended = self._ended.get(outcome.task_id)
        if ended is not None:
            has_record = ended.letter is not None or ended.row.result_ttl > 0
            return has_record and row_rules.was_recorded(ended.row, outcome)
        if record is None:
            self.missing.append(outcome)
            return False
        return row_rules.was_recorded(record.row, outcome)

    def release(self, row: Row) -> None:
        """Give back a row that its owner releases by ending its lease, charged nothing.

        Whether a run had begun is not known here, so a task that runs at most once ends.
        """
        token = row.token
        row_rules.discard_wait(row)
        is_running = row.status is TaskStatus.RUNNING and not row.cancel_requested
        if is_running and row_rules.runs_at_most_once(row):
            settled = Settled(
                finish=row_rules.finish_crashed(row, self.now, "its lease was given up")
            )
            self.settle(row, token, settled)
            return
        outcome = (
            Rescheduled(row.id, token, from_micros(self.now))
            if row.status is TaskStatus.RETRYING
            else Released(row.id, token)
        )
        self.settle(row, token, row_rules.settle(row, outcome, self.now))

    def settle(self, row: Row, token: int, settled: Settled) -> None:
        """Apply the effects of an outcome: the claim leaves its gates, the row changes or ends."""
        if row.gates:
            self.gates.leave(row, token, settled)
        if settled.finish is not None:
            self.finish(row, settled.finish)
            return
        newest = settled.result
        if settled.failure is not None:
            newest = self._encode_finish(settled.failure)
        if newest is not None:
            row.attached = True
            self._put(NEWEST, row.id, newest)
            self._delete(CHECKPOINT, row.id)
            self._delete(PROGRESS, row.id)
        self.update(row)

    # Rows

    def update(self, row: Row) -> None:
        """Write the row as it is at the end of the step."""
        self._changed.add(row.id)
        self._updated[row.id] = row

    def move(self, row: Row) -> None:
        """Write a row that was parked, or returned to the ready order."""
        if row.id not in self._updated:
            self._moved.add(row.id)
        self.update(row)

    def rewrite(self, row: Row) -> None:
        """Write a waiting row whose queue, order and body have changed. No gate blocks it for now."""
        if row.gates and row.parked is None:
            # It may have been offered, and its new place may be far behind.
            self.gates.refill(row)
        row.parked = None
        self.changes.rewritten = (*self.changes.rewritten, row.id)
        self.update(row)

    def restart(self, row: Row) -> None:
        """Write a waiting row that an enqueue has replaced or extended."""
        if row.occurrence == row.token and row.attached:
            # It was replaced: what its earlier call has stored is not for the new one.
            for kind in (CHECKPOINT, PROGRESS, NEWEST):
                self._delete(kind, row.id)
            self.changes.documents.append(cleared_output(row.id, self.now))
        self.rewrite(row)

    def finish(self, row: Row, finish: Finish) -> None:
        """End a row."""
        task_id = row.id
        if row.owner is None:
            # Of a row that is held, no page of waiting rows has another copy.
            self._changed.add(task_id)
            if row.gates:
                self.gates.forget(row)
                if row.parked is None:
                    self.gates.refill(row)
            if row.fair is not None:
                self.places.free(row)
        self._live.pop(task_id, None)
        if self._updated:
            self._updated.pop(task_id, None)
        if row.unique:
            self.changes.documents += release_unique_key(row, self.now)
        if row.attached:
            self._delete(PROGRESS, task_id)
            self._delete(NEWEST, task_id)
            if finish.dead is None:
                self._delete(CHECKPOINT, task_id)
                if not row.result_ttl:
                    self.changes.documents.append(cleared_output(task_id, self.now))
        if finish.dead is not None and (pending := self._pend_hook(row, finish, self.now)):
            self.changes.documents.append(pending)
        encoded = finish.encoded or self._encode_finish(finish)
        finished = row_rules.finished_row(row, finish, encoded, self.now)
        self._ended[task_id] = Ended(finished, finish.dead)
        if row.workflow is not None:
            self.ends.add(row)

    def _put(self, kind: str, key: str, data: bytes) -> None:
        self.changes.documents.append(DocumentChange(kind, key, ANY, data))

    def _delete(self, kind: str, key: str) -> None:
        self.changes.documents.append(DocumentChange(kind, key, ANY, None))

    def without_changed(self, rows: list[Row]) -> list[Row]:
        """The rows that this step has not changed; the store still has those as they were before."""
        if not self._changed:
            return rows
        return [row for row in rows if row.id not in self._changed]

    # The end

    async def offer(self) -> list[Row]:
        """Take the first rows out of the gates that have room; they return to the ready order."""
        offered = await self.gates.offer(self._changed)
        for row in offered:
            self.move(row)
        return offered

    def claim(self, row: Row, owner: str) -> None:
        """Claim a row that has entered its gates."""
        row_rules.claim(row, owner, self.now, self.section.epoch)
        if self._updated and row.id in self._updated:
            if row.id not in self._moved:
                # The claim is not all that has changed: an outcome of this step has released the row.
                return
            del self._updated[row.id]
        if row.workflow is not None:
            # Others that end in this step may change it.
            self._has_claimed_workflow = True
            self._live[row.id] = row
        self.changes.claimed.append(row)

    async def commit(self) -> frozenset[str]:
        """Write all changes; returns the ids of claimed rows that others took first."""
        await self.apply_ends()
        await self.offer()
        if self._has_claimed_workflow:
            # A row may have been claimed, and changed after that.
            self.changes.claimed = [
                row for row in self.changes.claimed if row.id not in self._updated
            ]
        self.changes.updated = list(self._updated.values())
        self.changes.moved = self._moved
        if self._seals is not None:
            await self._seal_letters(self._seals)
        self.changes.ended = list(self._ended.values())
        self.changes.documents += self.gates.changes()
        if self._ends is not None:
            self.changes.documents += self._ends.changes()
        if self._places is not None:
            self.changes.documents += await self._places.changes()
        if self.changes.is_empty:
            return frozenset()
        return await self.section.write(self.changes)

    async def _seal_letters(self, seals: RowSeals) -> None:
        dead = {each.row.id: each for each in self._ended.values() if each.letter is not None}
        unread = [task_id for task_id, each in dead.items() if not each.row.body]
        found = await self.section.load(unread, bodies=True) if unread else {}
        for task_id, each in dead.items():
            body = found[task_id].row.body if task_id in found else each.row.body
            assert each.letter is not None
            letter = seals.sealed_letter(each.row, body, each.letter)
            self._ended[task_id] = Ended(each.finished, letter)

    @property
    def ended_ids(self) -> list[str]:
        """The ids of the rows that this step ends."""
        return list(self._ended)

    @property
    def waiting(self) -> list[Row]:
        """The rows that outcomes of this step have returned to the ready order."""
        return [row for row in self._updated.values() if row.owner is None and row.parked is None]


def release_unique_key(row: Row, now: int) -> list[DocumentChange]:
    """Free the unique key of a row that ends, under all its names, unless it holds the key for longer."""
    if row.held_until is not None and row.held_until > now:
        return []
    holder = row.id.encode()
    return [DocumentChange(UNIQUE, name, holder, None, if_equal=True) for name in row.unique_names]
