"""Record: records outcomes and cancellations, gives back and retries tasks."""

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
from omniq.storage.file.gates import Gates
from omniq.storage.file.task_files import Change, TaskFiles
from omniq.storage.file.unique_keys import UniqueKeys
from omniq.storage.row_rules import Finish, Row, Settled
from omniq.storage.types import Entry

EncodeFinish = Callable[[Finish, bytes | None], bytes]


class Held(msgspec.Struct):
    """A task that this process has claimed, with its record."""

    claimed: Claimed
    live: Live


class HeldTasks:
    """The claims of an owner in this process, shared with the storage's siblings.

    No lock is needed: each operation on the dictionary is atomic.
    """

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.changing: frozenset[str] = frozenset()
        """Tasks whose files the owner is replacing at this moment."""
        self.lease_path = ""

    def of(self, owner: str) -> list[Held]:
        """The tasks that this process has claimed for the owner."""
        return [held for held in list(self.held.values()) if held.claimed.owner == owner]

    def forget(self, owner: str) -> None:
        """Remove the claims of an owner that was fenced or has retired."""
        for held in self.of(owner):
            self.held.pop(held.claimed.id, None)


class _PlannedChange(msgspec.Struct):
    """The change that an outcome makes, the row before it, and its effects on the gates."""

    change: Change
    before: Row
    settled: Settled


class Recorder:
    """Changes the records of claimed, waiting and dead tasks."""

    def __init__(
        self,
        task_files: TaskFiles,
        gates: Gates,
        unique: UniqueKeys,
        held_tasks: HeldTasks,
        encode_finish: EncodeFinish,
    ) -> None:
        self._task_files = task_files
        self._clock: Clock = task_files.clock
        self._gates = gates
        self._unique = unique
        self._held_tasks = held_tasks
        self._encode_finish = encode_finish

    # Outcomes

    def record(self, owner: str, entries: Sequence[Entry], now: int) -> list[bool]:
        """Record the outcomes, with one wait for the disk for all that concern different tasks."""
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
        plans = [self._plan_held(owner, entry, now) for entry in entries]
        self._held_tasks.changing = frozenset(entry.outcome.task_id for entry in entries)
        try:
            self._task_files.commit([plan.change for plan in plans if plan is not None])
        finally:
            self._held_tasks.changing = frozenset()
        recorded = []
        for entry, plan in zip(entries, plans, strict=True):
            if plan is not None and plan.change.is_committed:
                self._after_commit(plan, now)
                recorded.append(True)
            else:
                recorded.append(self._record_by_lookup(owner, entry, now))
        return recorded

    def _record_by_lookup(self, owner: str, entry: Entry, now: int) -> bool:
        """Record an outcome whose claim this process does not hold, or holds no more.

        Reads the task's record, which shows whether the claim is current or the outcome recorded.
        """
        task_id = entry.outcome.task_id
        held = self._held_tasks.held.get(task_id)
        if held is not None and held.claimed.token == entry.outcome.token:
            del self._held_tasks.held[task_id]
        found = self._task_files.find(task_id) or self._task_files.read_dead(task_id)
        if found is None:
            return False
        if isinstance(found, Live) and row_rules.is_current(found.row, entry.outcome, owner):
            # Cancelled meanwhile, or claimed through a sibling: change the record just read.
            plan = self._plan_change(found, entry, now)
            self._task_files.commit([plan.change])
            if not plan.change.is_committed:
                return False
            self._after_commit(plan, now)
            return True
        return row_rules.was_recorded(found.row, entry.outcome)

    def _plan_held(self, owner: str, entry: Entry, now: int) -> _PlannedChange | None:
        held = self._held_tasks.held.get(entry.outcome.task_id)
        if held is None or held.claimed.is_cancelled:
            return None
        if not row_rules.is_current(held.live.row, entry.outcome, owner):
            return None
        return self._plan_change(held.live, entry, now)

    def _plan_change(self, live: Live, entry: Entry, now: int) -> _PlannedChange:
        before = live.row
        row = copy.copy(before)
        settled = row_rules.settle(row, entry.outcome, now)
        change = self._change(
            _path_of(before), before, self._next_record(live, row, settled, entry, now)
        )
        return _PlannedChange(change, before, settled)

    def _next_record(
        self, live: Live, row: Row, settled: Settled, entry: Entry | None, now: int
    ) -> Live | Ended:
        result = None if entry is None else entry.result
        if settled.finish is not None:
            return self._ended_record(row, settled.finish, result, now)
        if settled.result is not None and result is not None:
            return Live(row, newest=result, clears_notes=True)
        return Live(row, newest=live.newest)

    def _ended_record(self, row: Row, finish: Finish, result: bytes | None, now: int) -> Ended:
        finished = row_rules.finished_row(row, finish, self._encode_finish(finish, result), now)
        return Ended(row, now, finished.expires_at, finished.result, finish.dead)

    def _change(self, source: str, before: Row, after: Live | Ended) -> Change:
        return self._task_files.change(source, before.token, before.id, after)

    def _after_commit(self, plan: _PlannedChange, now: int) -> None:
        """Apply the effects of a committed change: on the held tasks and on the gates."""
        before, after, settled = plan.before, plan.change.after, plan.settled
        if isinstance(after, Live) and after.row.owner is not None:
            claimed = self._task_files.index.running.get(before.id)
            if claimed is not None and before.id in self._held_tasks.held:
                self._held_tasks.held[before.id] = Held(claimed, after)
        else:
            self._held_tasks.held.pop(before.id, None)
        if before.gates:
            self._gates.leave(
                before.gates, before.id, before.token, settled.effect, now, settled.reason
            )

    # Recovery, cancellation, retry of dead letters

    def give_back(
        self, claims: Sequence[Claimed], now: int, max_crashes: int
    ) -> list[tuple[Row, Claimed]]:
        """Give back the tasks of a dead owner; returns those that no other process gave back."""
        read = ((claimed, self._task_files.read_claimed(claimed)) for claimed in claims)
        by_id = {
            claimed.id: (claimed, live)
            for claimed, live in read
            if live is not None and not self._has_ended(claimed, live)
        }
        rows = [copy.copy(live.row) for _, live in by_id.values()]
        plans: list[_PlannedChange] = []
        for row, settled in row_rules.give_back(rows, now, max_crashes):
            claimed, live = by_id[row.id]
            after = self._next_record(live, row, settled, None, now)
            plans.append(
                _PlannedChange(self._change(claimed.path, live.row, after), live.row, settled)
            )
        # Suspects last: a process that recovers at the same time sees them as long as any task is
        # left, and so charges only them.
        plans.sort(key=lambda plan: plan.before.is_suspect)
        self._task_files.commit([plan.change for plan in plans])
        taken = [plan for plan in plans if plan.change.is_committed]
        for plan in taken:
            self._after_commit(plan, now)
        return [(plan.change.after.row, by_id[plan.before.id][0]) for plan in taken]

    def _has_ended(self, claimed: Claimed, live: Live) -> bool:
        """Whether the claim's outcome is stored although its `.running` file still exists."""
        # Only a file system that reorders renames in a power cut can leave this state. `seq`
        # distinguishes this task's result from that of an earlier task with the same id.
        ended = self._task_files.read_ended(claimed.id)
        if ended is None or (ended.row.seq, ended.row.token) != (live.row.seq, claimed.token):
            return False
        self._task_files.disk.remove(claimed.path)
        self._task_files.index.drop(claimed.id)
        return True

    def retire(self, owner: str, now: int) -> None:
        """Release all tasks that the owner holds, without using an attempt."""
        self._task_files.refresh()
        claims = [each for each in self._task_files.index.running.values() if each.owner == owner]
        entries: list[Entry] = []
        for claimed in claims:
            live = self._task_files.read_claimed(claimed)
            if live is None:
                continue
            outcome: Outcome = Released(claimed.id, claimed.token)
            if live.row.status is TaskStatus.RETRYING:
                outcome = Rescheduled(claimed.id, claimed.token, self._clock.now())
            self._held_tasks.held[claimed.id] = Held(claimed, live)
            entries.append(Entry(outcome, None))
        self.record(owner, entries, now)

    def cancel(self, task_id: str, reason: str, now: int) -> bool:
        """End a waiting task, or mark a held one; False when the task is not live."""
        while True:
            live = self._task_files.find_live(task_id)
            if live is None:
                return False
            if live.row.owner is None:
                if self.end_waiting(live, reason, now):
                    return True
                continue
            claimed = self._task_files.index.running.get(task_id)
            if claimed is None:
                continue
            if claimed.is_cancelled:
                return True
            if self._task_files.disk.move(claimed.path, claimed.cancelled().path):
                self._task_files.index.hold(claimed.cancelled())
                self._task_files.mark_unsynced("queue")
                return True

    def end_waiting(self, live: Live, reason: str, now: int) -> bool:
        """End a waiting task as CANCELLED; False when it has been claimed meanwhile."""
        row = copy.copy(live.row)
        finish = row_rules.finish_cancelled(row, now, reason)
        change = self._change(
            task_path(row.id), live.row, self._ended_record(row, finish, None, now)
        )
        self._task_files.commit([change])
        if not change.is_committed:
            self._task_files.index.drop(row.id)
        return change.is_committed

    def end_cancelled(self, claimed: Claimed, now: int) -> None:
        """End a task that was cancelled at the moment of its claim.

        Its owner does not know of the claim, so no other step would ever end it.
        """
        cancelled = claimed.cancelled()
        live = self._task_files.read_just_claimed(cancelled)
        if live is not None:
            row = copy.copy(live.row)
            finish = row_rules.finish_cancelled(row, now, "cancelled")
            after = self._ended_record(row, finish, None, now)
            self._task_files.commit([self._change(cancelled.path, live.row, after)])

    def retry_dead(
        self, dead: Ended, body: bytes | None, from_start: bool, seq: int, now: int
    ) -> bool:
        """Put a dead letter's task back into its queue; True for one of several that do so."""
        row = copy.copy(dead.row)
        row_rules.retry_dead(row, now, body=body)
        row.seq = seq
        after = Live(row, clears_notes=from_start)
        change = self._change(dead_path(row.id), dead.row, after)
        self._task_files.prepare([change])
        try:
            if row.unique:
                holder = self._unique.take(row.unique, row.id, via=change.committed.part)
                if holder is not None:
                    raise DuplicateTask(holder)
        except BaseException:
            self._task_files.delete_parts(change)
            raise
        self._task_files.commit_prepared(change)
        self._task_files.mark_unsynced("dead")
        return change.is_committed


def _path_of(row: Row) -> str:
    """The path of a live task, computed from its row."""
    if row.owner is None:
        return task_path(row.id)
    return Claimed(row.id, row.token, row.owner, row.started_at, row.cancel_requested).path
