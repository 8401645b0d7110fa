"""What a run came to, carried into the files: outcomes, cancellations, lost workers, dead letters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import msgspec

from omniq.clock import Clock
from omniq.errors import DuplicateTask
from omniq.models import TaskStatus
from omniq.outcomes import Outcome, Released, Rescheduled
from omniq.storage import row_rules
from omniq.storage.file.encoding import Ended, Live
from omniq.storage.file.file_names import Claimed, dead_path, task_path
from omniq.storage.file.gates import Gatekeeper
from omniq.storage.file.task_files import Change, Ledger
from omniq.storage.file.unique_keys import UniqueKeys
from omniq.storage.row_rules import Finish, Row, Settled
from omniq.storage.types import Entry

EncodeFinish = Callable[[Finish, bytes | None], bytes]


class Held(msgspec.Struct):
    """A task that this process has claimed, with its record."""

    claimed: Claimed
    live: Live


class Holdings:
    """What an owner has claimed. Shared with its siblings; each dictionary step is atomic."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.changing: frozenset[str] = frozenset()
        """Tasks whose file is just being replaced by its owner."""
        self.lease_path = ""

    def of(self, owner: str) -> list[Held]:
        """What that owner holds, as far as this process has done it."""
        return [held for held in list(self.held.values()) if held.claimed.owner == owner]

    def forget(self, owner: str) -> None:
        """The owner was fenced."""
        for held in self.of(owner):
            self.held.pop(held.claimed.id, None)


class _Plan(msgspec.Struct):
    """An outcome worked out: the change it makes, and what follows from that."""

    change: Change
    before: Row
    settled: Settled


class Recorder:
    """Makes changes of tasks that end, come back, or go on."""

    def __init__(
        self,
        ledger: Ledger,
        gatekeeper: Gatekeeper,
        unique: UniqueKeys,
        holdings: Holdings,
        encode_finish: EncodeFinish,
    ) -> None:
        self._ledger = ledger
        self._clock: Clock = ledger.clock
        self._gatekeeper = gatekeeper
        self._unique = unique
        self._holdings = holdings
        self._encode_finish = encode_finish

    # Outcomes

    def record(self, owner: str, entries: Sequence[Entry], now: int) -> list[bool]:
        """Record the outcomes, with one barrier for all that concern different tasks."""
        recorded: list[bool] = []
        batch: dict[str, Entry] = {}
        for entry in entries:
            if entry.outcome.task_id in batch:
                recorded += self._record(owner, list(batch.values()), now)
                batch = {}
            batch[entry.outcome.task_id] = entry
        return recorded + self._record(owner, list(batch.values()), now)

    def _record(self, owner: str, entries: list[Entry], now: int) -> list[bool]:
        if not entries:
            return []
        plans = [self._plan(owner, entry, now) for entry in entries]
        self._holdings.changing = frozenset(entry.outcome.task_id for entry in entries)
        try:
            self._ledger.commit([plan.change for plan in plans if plan is not None])
        finally:
            self._holdings.changing = frozenset()
        recorded = []
        for entry, plan in zip(entries, plans, strict=True):
            if plan is not None and plan.change.holds:
                self._follow_up(plan, now)
                recorded.append(True)
            else:
                recorded.append(self._record_late(owner, entry, now))
        return recorded

    def _record_late(self, owner: str, entry: Entry, now: int) -> bool:
        """What to say of an outcome whose claim is not where this process left it."""
        task_id = entry.outcome.task_id
        held = self._holdings.held.get(task_id)
        if held is not None and held.claimed.token == entry.outcome.token:
            del self._holdings.held[task_id]
        found = self._ledger.find(task_id) or self._ledger.read_dead(task_id)
        if found is None:
            return False
        if isinstance(found, Live) and row_rules.is_current(found.row, entry.outcome, owner):
            # Cancelled meanwhile, or claimed through a sibling: with the record at hand, once more.
            plan = self._work_out(found, entry, now)
            self._ledger.commit([plan.change])
            if not plan.change.holds:
                return False
            self._follow_up(plan, now)
            return True
        return row_rules.was_recorded(found.row, entry.outcome)

    def _plan(self, owner: str, entry: Entry, now: int) -> _Plan | None:
        held = self._holdings.held.get(entry.outcome.task_id)
        if held is None or held.claimed.is_cancelled:
            return None
        if not row_rules.is_current(held.live.row, entry.outcome, owner):
            return None
        return self._work_out(held.live, entry, now)

    def _work_out(self, live: Live, entry: Entry, now: int) -> _Plan:
        before = live.row
        row = copy.copy(before)
        settled = row_rules.settle(row, entry.outcome, now)
        change = self._change(_path_of(before), before, self._after(live, row, settled, entry, now))
        return _Plan(change, before, settled)

    def _after(
        self, live: Live, row: Row, settled: Settled, entry: Entry | None, now: int
    ) -> Live | Ended:
        result = None if entry is None else entry.result
        if settled.finish is not None:
            return self._ended(row, settled.finish, result, now)
        if settled.result is not None and result is not None:
            return Live(row, newest=result, clears_notes=True)
        return Live(row, newest=live.newest)

    def _ended(self, row: Row, finish: Finish, result: bytes | None, now: int) -> Ended:
        finished = row_rules.finished_row(row, finish, self._encode_finish(finish, result), now)
        return Ended(row, now, finished.expires_at, finished.result, finish.dead)

    def _change(self, source: str, before: Row, after: Live | Ended) -> Change:
        return self._ledger.change(source, before.token, before.id, after)

    def _follow_up(self, plan: _Plan, now: int) -> None:
        """What a change that holds has as a consequence outside of the task's own record."""
        before, after, settled = plan.before, plan.change.after, plan.settled
        if isinstance(after, Live) and after.row.owner is not None:
            claimed = self._ledger.index.running.get(before.id)
            if claimed is not None and before.id in self._holdings.held:
                self._holdings.held[before.id] = Held(claimed, after)
        else:
            self._holdings.held.pop(before.id, None)
        if before.gates:
            self._gatekeeper.leave(
                before.gates, before.id, before.token, settled.effect, now, settled.reason
            )

    # Whatever else ends a claim

    def give_back(
        self, claims: Sequence[Claimed], now: int, max_crashes: int
    ) -> list[tuple[Row, Claimed]]:
        """Take everything from an owner that is dead; what was taken by us and not by another."""
        read = ((claimed, self._ledger.read_claimed(claimed)) for claimed in claims)
        by_id = {
            claimed.id: (claimed, live)
            for claimed, live in read
            if live is not None and not self._has_ended(claimed, live)
        }
        rows = [copy.copy(live.row) for _, live in by_id.values()]
        plans: list[_Plan] = []
        for row, settled in row_rules.give_back(rows, now, max_crashes):
            claimed, live = by_id[row.id]
            after = self._after(live, row, settled, None, now)
            plans.append(_Plan(self._change(claimed.path, live.row, after), live.row, settled))
        # Suspects last: whoever recovers at the same time sees them for as long as anything is
        # left, and so charges nobody else.
        plans.sort(key=lambda plan: plan.before.is_suspect)
        self._ledger.commit([plan.change for plan in plans])
        taken = [plan for plan in plans if plan.change.holds]
        for plan in taken:
            self._follow_up(plan, now)
        return [(plan.change.after.row, by_id[plan.before.id][0]) for plan in taken]

    def _has_ended(self, claimed: Claimed, live: Live) -> bool:
        """Whether the claim's outcome is on record although its file is still there."""
        # Only a file system that reorders renames in a power cut can leave it like that. The
        # number tells a result of this task from one of an earlier task with the same id.
        ended = self._ledger.read_ended(claimed.id)
        if ended is None or (ended.row.seq, ended.row.token) != (live.row.seq, claimed.token):
            return False
        self._ledger.disk.remove(claimed.path)
        self._ledger.index.drop(claimed.id)
        return True

    def retire(self, owner: str, now: int) -> None:
        """Release all that the owner holds, uncharged."""
        self._ledger.refresh()
        claims = [each for each in self._ledger.index.running.values() if each.owner == owner]
        entries: list[Entry] = []
        for claimed in claims:
            live = self._ledger.read_claimed(claimed)
            if live is None:
                continue
            outcome: Outcome = Released(claimed.id, claimed.token)
            if live.row.status is TaskStatus.RETRYING:
                outcome = Rescheduled(claimed.id, claimed.token, self._clock.now())
            self._holdings.held[claimed.id] = Held(claimed, live)
            entries.append(Entry(outcome, None))
        self.record(owner, entries, now)

    def cancel(self, task_id: str, reason: str, now: int) -> bool:
        """End a waiting task, or mark a held one; False when there is nothing to cancel."""
        while True:
            live = self._ledger.find_live(task_id)
            if live is None:
                return False
            if live.row.owner is None:
                if self.end_waiting(live, reason, now):
                    return True
                continue
            claimed = self._ledger.index.running.get(task_id)
            if claimed is None:
                continue
            if claimed.is_cancelled:
                return True
            if self._ledger.disk.move(claimed.path, claimed.cancelled().path):
                self._ledger.index.hold(claimed.cancelled())
                self._ledger.touch("queue")
                return True

    def end_waiting(self, live: Live, reason: str, now: int) -> bool:
        """Make a task that nobody holds CANCELLED; False when it has been claimed meanwhile."""
        row = copy.copy(live.row)
        finish = row_rules.finish_cancelled(row, now, reason)
        change = self._change(task_path(row.id), live.row, self._ended(row, finish, None, now))
        self._ledger.commit([change])
        if not change.holds:
            self._ledger.index.drop(row.id)
        return change.holds

    def end_cancelled(self, claimed: Claimed, now: int) -> None:
        """End a task whose cancellation was asked for in the moment it was claimed.

        Its owner does not know that it holds it, and nobody else would ever take it away.
        """
        cancelled = claimed.cancelled()
        live = self._ledger.read_held_waiter(cancelled)
        if live is not None:
            row = copy.copy(live.row)
            finish = row_rules.finish_cancelled(row, now, "cancelled")
            after = self._ended(row, finish, None, now)
            self._ledger.commit([self._change(cancelled.path, live.row, after)])

    def revive(self, dead: Ended, body: bytes | None, from_start: bool, seq: int, now: int) -> bool:
        """Put a dead letter's task back in the queue. Of many that do so, one gets True."""
        row = copy.copy(dead.row)
        row_rules.revive(row, now, body=body)
        row.seq = seq
        after = Live(row, clears_notes=from_start)
        change = self._change(dead_path(row.id), dead.row, after)
        self._ledger.prepare([change])
        try:
            if row.unique:
                holder = self._unique.take(row.unique, row.id, via=change.committed.part)
                if holder is not None:
                    raise DuplicateTask(holder)
        except BaseException:
            self._ledger.drop_parts(change)
            raise
        self._ledger.decide(change)
        self._ledger.touch("dead")
        return change.holds


def _path_of(row: Row) -> str:
    """Where the record of a live task is, by what the record says."""
    if row.owner is None:
        return task_path(row.id)
    return Claimed(row.id, row.token, row.owner, row.started_at, row.cancel_requested).path
