"""Plans what outcomes change; the scripts apply it.

The rules are those of `omniq.storage.row_rules`, applied here to the rows as they were last read. A
change names the place from which it starts. If the task is in another place by then, the script
changes nothing, and the change is planned again from what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from omniq.outcomes import Outcome, Succeeded
from omniq.storage import row_rules
from omniq.storage.redis.encoding import (
    STATUS_LETTERS,
    SUCCEEDED,
    StoredRow,
    encode_dead,
    encode_state,
    ended_place,
    ended_times,
    live_place,
    succeeded_place,
)
from omniq.storage.redis.scripts import raw
from omniq.storage.row_rules import Finish, Row, Settled
from omniq.storage.types import Entry

EncodeFinish = Callable[[Finish, bytes | None], bytes]
Change = tuple[Any, ...]
"""See `lua/lib/changes.lua`."""

DONE, ELSEWHERE, REFUSED = "102"
"""The reply of a script to a change: applied; the task is in another place; the owner was fenced."""


class ChangePlanner:
    """Plans changes as of one instant."""

    def __init__(self, now: int, encode_finish: EncodeFinish) -> None:
        self.now = now
        self._encode_finish = encode_finish

    def outcome(
        self, stored: StoredRow, settled: Settled, result: bytes | None
    ) -> tuple[Change, StoredRow]:
        """The change of a settled outcome, with its effect on gates; and the task afterwards."""
        row = stored.row
        gates = [(gate.key, gate.kind, gate.size, gate.span) for gate in row.gates]
        if settled.finish is not None:
            return self._end(stored, settled.finish, result, gates, settled)
        newest: Any = ""
        if settled.result is not None and result is not None:
            newest = raw(result)
        more: Any = 0
        if gates or newest:
            more = ("", gates, settled.effect, settled.reason, newest, "")
        place = live_place(row, stored.claim_id if row.owner is not None else "")
        change = (row.id, stored.place, place, raw(encode_state(row)), "", more)
        return change, StoredRow(row, place)

    def end(self, stored: StoredRow, finish: Finish) -> Change:
        """The change that ends a task without an outcome of a run."""
        return self._end(stored, finish, None, [], Settled())[0]

    def cancel_request(self, stored: StoredRow) -> Change:
        """The change that asks the owner of a task to stop it."""
        stored.row.cancel_requested = True
        return (stored.row.id, stored.place, live_place(stored.row, stored.claim_id), "", "", 0)

    def _end(
        self,
        stored: StoredRow,
        finish: Finish,
        result: bytes | None,
        gates: Sequence[tuple[str, str, int, int]],
        settled: Settled,
    ) -> tuple[Change, StoredRow]:
        row, before = stored.row, stored.place
        encoded = self._encode_finish(finish, result)
        finished = row_rules.finished_row(row, finish, encoded, self.now)
        place = ended_place(row, before, self.now) if row.result_ttl else ""
        letter: Any = "" if finish.dead is None else raw(encode_dead(finish.dead, row))
        more: Any = 0
        if row.unique or gates or letter:
            more = (row.unique or "", gates, settled.effect, settled.reason, "", letter)
        ended = raw(encode_state(row, encoded)) if place else ""
        # A dead letter is a record, too, where the result leaves none.
        after = place or ("dead" if letter else "")
        return (row.id, before, place, "", ended, more), StoredRow(row, after, finished)


class _EndGroup(NamedTuple):
    """Plain endings that have everything but the task in common."""

    numbers: list[int]
    values: list[Any]
    """Of each: id, place before, place, and what is stored at its end."""

    times: str
    """When they ended and when their record expires, as the last part of their place."""


class RecordPlan:
    """Changes for one call of the script: plain endings in groups, and all others in order."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._groups: dict[tuple[str, str, bool, str, int, int], _EndGroup] = {}
        self._others: list[int] = []

    def add(
        self, number: int, change: Change, before: str, after: StoredRow, is_only: bool
    ) -> None:
        """Add the change of the entry with that number. `is_only`: it is the task's only entry."""
        if after.finished is None or not is_only or change[5] != 0:
            self._others.append(number)
            self.changes.append(change)
            return
        row = after.row
        group = self._group(row, before, STATUS_LETTERS[row.status], after.finished.finished_at)
        group.numbers.append(number)
        group.values.extend((change[0], change[1], change[2], change[4]))

    def add_success(self, number: int, stored: StoredRow, result: bytes, now: int) -> None:
        """Add the success of a task that has no other entry, no gates and no unique key."""
        row = stored.row
        group = self._group(row, STATUS_LETTERS[row.status], SUCCEEDED, now)
        row.settled = row.token
        group.numbers.append(number)
        if row.result_ttl:
            place = succeeded_place(row, stored.place, group.times)
            ended = raw(encode_state(row, result))
            group.values.extend((row.id, stored.place, place, ended))
        else:
            group.values.extend((row.id, stored.place, "", ""))

    def _group(self, row: Row, before: str, status: str, now: int) -> _EndGroup:
        key = (row.queue, before, row.is_suspect, status, now, row.result_ttl)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _EndGroup([], [], ended_times(row, now))
        return group

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the script to change."""
        return not (self._groups or self.changes)

    @property
    def groups(self) -> list[tuple[Any, ...]]:
        """Plain endings, see `end_group` in `lua/lib/changes.lua`."""
        return [
            (queue, before, int(suspect), status, str(now), now + ttl if ttl else 0, group.values)
            for (queue, before, suspect, status, now, ttl), group in self._groups.items()
        ]

    def codes(self, text: str) -> dict[int, str]:
        """The code of each entry by its number; the script replies for groups, then changes."""
        numbers = [number for group in self._groups.values() for number in group.numbers]
        return dict(zip([*numbers, *self._others], text, strict=True))


class Recording:
    """Entries that are being recorded: the rows as read, the entries left, and the answers so far."""

    def __init__(self, owner: str, entries: list[Entry], known: Mapping[str, StoredRow]) -> None:
        self._owner = owner
        self._entries = entries
        self._left = list(range(len(entries)))
        self._stored: dict[str, StoredRow | None] = {
            task_id: stored
            for entry in entries
            if (stored := known.get(task_id := entry.outcome.task_id)) is not None
            and row_rules.is_current(stored.row, entry.outcome, owner)
        }
        # Answers by number of entries that change nothing, valid if the rest of the plan is applied.
        self._planned_answers: dict[int, bool] = {}
        self._plan = RecordPlan()
        self.answers = [False] * len(entries)

    @property
    def unread(self) -> list[str]:
        """Ids of tasks that have to be read before a plan can be made."""
        ids = (self._entries[number].outcome.task_id for number in self._left)
        return list(dict.fromkeys(task_id for task_id in ids if task_id not in self._stored))

    def add_read(self, found: Mapping[str, StoredRow | None]) -> None:
        """Use these tasks for the next plan."""
        self._stored.update(found)

    def plan(self, planner: ChangePlanner) -> RecordPlan:
        """The changes for all entries that are left."""
        self._planned_answers, self._plan = {}, RecordPlan()
        is_single = len({self._entries[n].outcome.task_id for n in self._left}) == len(self._left)
        for number in self._left:
            entry = self._entries[number]
            outcome = entry.outcome
            stored = self._stored[outcome.task_id]
            if stored is None or not self._is_current(stored, outcome):
                was_recorded = stored is not None and _was_recorded(stored, outcome)
                self._planned_answers[number] = was_recorded
                continue
            row, result = stored.row, entry.result
            is_held = row.owner is not None
            if result is not None and is_single and is_held and _is_plain_success(row, outcome):
                del self._stored[outcome.task_id]
                self._plan.add_success(number, stored, result, planner.now)
                continue
            before = STATUS_LETTERS[row.status]
            settled = row_rules.settle(row, outcome, planner.now)
            change, after = planner.outcome(stored, settled, result)
            self._stored[outcome.task_id] = after
            self._plan.add(number, change, before, after, is_single and is_held)
        return self._plan

    def _is_current(self, stored: StoredRow, outcome: Outcome) -> bool:
        return stored.finished is None and row_rules.is_current(stored.row, outcome, self._owner)

    def apply_codes(self, text: str) -> None:
        """Use the script's reply to the plan; entries whose task was elsewhere are planned again."""
        if not self._planned_answers and not text.strip(DONE):
            for number in self._left:
                self.answers[number] = True
            self._left = []
            return
        codes = self._plan.codes(text)
        stale = {self._task_id(number) for number, code in codes.items() if code != DONE}
        left: list[int] = []
        for number in self._left:
            code = codes.get(number, ELSEWHERE)
            if code != ELSEWHERE:
                self.answers[number] = code == DONE
            elif self._task_id(number) in stale:
                left.append(number)
            else:
                self.answers[number] = self._planned_answers[number]
        self._left = left
        for task_id in stale:
            self._stored.pop(task_id, None)

    def _task_id(self, number: int) -> str:
        return self._entries[number].outcome.task_id

    @property
    def is_done(self) -> bool:
        """Whether every entry has its answer."""
        return not self._left

    def still_held(self) -> Iterable[StoredRow]:
        """The tasks that the owner holds after their outcome: failures that are to be rescheduled."""
        for stored in self._stored.values():
            if (
                stored is not None
                and stored.finished is None
                and stored.row.owner == self._owner
            ):  # fmt: skip
                yield stored


def _is_plain_success(row: Row, outcome: Outcome) -> bool:
    """Whether the rules would only end the task as SUCCESS, as for most tasks."""
    return (
        type(outcome) is Succeeded
        and outcome.next_eta is None
        and not row.gates
        and row.unique is None
    )


def _was_recorded(stored: StoredRow, outcome: Outcome) -> bool:
    # An outcome that left no record is not known to have been recorded.
    has_no_record = stored.finished is not None and not stored.place
    return not has_no_record and row_rules.was_recorded(stored.row, outcome)


class KnownRows:
    """The tasks that this object has claimed and not recorded yet, as they were when claimed."""

    def __init__(self) -> None:
        self._owner = ""
        self._stored: dict[str, StoredRow] = {}

    def take(self, owner: str, entries: list[Entry]) -> dict[str, StoredRow]:
        """Remove and return the tasks of these entries, since recording may change them."""
        if owner != self._owner:
            # The tasks of a former owner have been given back.
            self._owner, self._stored = owner, {}
        ids = {entry.outcome.task_id for entry in entries}
        return {task_id: self._stored.pop(task_id) for task_id in ids if task_id in self._stored}

    def add(self, owner: str, stored: Iterable[StoredRow]) -> None:
        """Add tasks that the owner holds."""
        if owner == self._owner:
            self._stored.update((each.row.id, each) for each in stored)
