"""What outcomes do to tasks, worked out here and made there.

The rules are those of `_rows`. A change names the place it starts from; when the task is elsewhere
by then, the script leaves it alone, and the change is worked out anew from what is on record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from omniq.outcomes import Outcome, Succeeded
from omniq.storage import row_rules
from omniq.storage.redis.encoding import (
    STATUS_LETTERS,
    SUCCEEDED,
    Kept,
    ended_place,
    grave_of,
    live_place,
    state_of,
    succeeded_place,
    times_of,
)
from omniq.storage.redis.scripts import raw
from omniq.storage.row_rules import Finish, Row, Settled
from omniq.storage.types import Entry

EncodeFinish = Callable[[Finish, bytes | None], bytes]
Change = tuple[Any, ...]
"""See `lua/settling.lua`."""

DONE, ELSEWHERE, REFUSED = "102"
"""What a script answers to a change."""


class Changes:
    """Works out changes as of one instant."""

    def __init__(self, now: int, encode_finish: EncodeFinish) -> None:
        self.now = now
        self._encode_finish = encode_finish

    def of_outcome(self, kept: Kept, settled: Settled, result: bytes | None) -> tuple[Change, Kept]:
        """The change that a settled outcome is, told to the gates; and the task afterwards."""
        row = kept.row
        gates = [(gate.key, gate.kind, gate.size, gate.span) for gate in row.gates]
        if settled.finish is not None:
            return self._ending(kept, settled.finish, result, gates, settled)
        newest: Any = ""
        if settled.result is not None and result is not None:
            newest = raw(result)
        more: Any = 0
        if gates or newest:
            more = ("", gates, settled.effect, settled.reason, newest, "")
        place = live_place(row, kept.claim_id if row.owner is not None else "")
        return (row.id, kept.place, place, raw(state_of(row)), "", more), Kept(row, place)

    def of_end(self, kept: Kept, finish: Finish) -> Change:
        """The change that ends a task no run of which came to anything."""
        return self._ending(kept, finish, None, [], Settled())[0]

    def of_cancel_request(self, kept: Kept) -> Change:
        """The change that tells the owner of a task to stop it."""
        kept.row.cancel_requested = True
        return (kept.row.id, kept.place, live_place(kept.row, kept.claim_id), "", "", 0)

    def _ending(
        self,
        kept: Kept,
        finish: Finish,
        result: bytes | None,
        gates: Sequence[tuple[str, str, int, int]],
        settled: Settled,
    ) -> tuple[Change, Kept]:
        row, before = kept.row, kept.place
        encoded = self._encode_finish(finish, result)
        finished = row_rules.finished_row(row, finish, encoded, self.now)
        place = ended_place(row, before, self.now) if row.result_ttl else ""
        letter: Any = "" if finish.dead is None else raw(grave_of(finish.dead, row))
        more: Any = 0
        if row.unique or gates or letter:
            more = (row.unique or "", gates, settled.effect, settled.reason, "", letter)
        ended = raw(state_of(row, encoded)) if place else ""
        # A dead letter is a record, too, where the result leaves none.
        after = place or ("dead" if letter else "")
        return (row.id, before, place, "", ended, more), Kept(row, after, finished)


class _Group(NamedTuple):
    """Plain endings that have all but the task in common."""

    numbers: list[int]
    values: list[Any]
    """Of each: id, place before, place, what it ended with."""

    times: str
    """When they ended and when that is forgotten, as the end of their place."""


class Plan:
    """Changes on their way to the script: plain endings in groups, and all others in order."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._groups: dict[tuple[str, str, bool, str, int, int], _Group] = {}
        self._others: list[int] = []

    def add(self, number: int, change: Change, before: str, after: Kept, is_only: bool) -> None:
        """Plan the change of the entry of that number. `is_only`: no other is about that task."""
        if after.finished is None or not is_only or change[5] != 0:
            self._others.append(number)
            self.changes.append(change)
            return
        row = after.row
        group = self._group(row, before, STATUS_LETTERS[row.status], after.finished.finished_at)
        group.numbers.append(number)
        group.values.extend((change[0], change[1], change[2], change[4]))

    def add_success(self, number: int, kept: Kept, result: bytes, now: int) -> None:
        """Plan the end of the only entry about a task that did well, and that nothing waits for."""
        row = kept.row
        group = self._group(row, STATUS_LETTERS[row.status], SUCCEEDED, now)
        row.settled = row.token
        group.numbers.append(number)
        if row.result_ttl:
            place = succeeded_place(row, kept.place, group.times)
            ended = raw(state_of(row, result))
            group.values.extend((row.id, kept.place, place, ended))
        else:
            group.values.extend((row.id, kept.place, "", ""))

    def _group(self, row: Row, before: str, status: str, now: int) -> _Group:
        key = (row.queue, before, row.is_suspect, status, now, row.result_ttl)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group([], [], times_of(row, now))
        return group

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the script to change."""
        return not (self._groups or self.changes)

    @property
    def groups(self) -> list[tuple[Any, ...]]:
        """Plain endings, see `end_group` in `lua/settling.lua`."""
        return [
            (queue, before, int(suspect), status, str(now), now + ttl if ttl else 0, group.values)
            for (queue, before, suspect, status, now, ttl), group in self._groups.items()
        ]

    def codes(self, text: str) -> dict[int, str]:
        """What became of each entry, from what the script says of groups and changes in order."""
        numbers = [number for group in self._groups.values() for number in group.numbers]
        return dict(zip([*numbers, *self._others], text, strict=True))


class Recording:
    """Entries on their way onto record: what is known, what is left, what was answered."""

    def __init__(self, owner: str, entries: list[Entry], known: Mapping[str, Kept]) -> None:
        self._owner = owner
        self._entries = entries
        self._left = list(range(len(entries)))
        self._kept: dict[str, Kept | None] = {
            task_id: kept
            for entry in entries
            if (kept := known.get(task_id := entry.outcome.task_id)) is not None
            and row_rules.is_current(kept.row, entry.outcome, owner)
        }
        self._answered: dict[int, bool] = {}
        self._plan = Plan()
        self.answers = [False] * len(entries)

    @property
    def unread(self) -> list[str]:
        """Ids of tasks that have to be read before a plan can be made."""
        ids = (self._entries[number].outcome.task_id for number in self._left)
        return list(dict.fromkeys(task_id for task_id in ids if task_id not in self._kept))

    def learn(self, found: Mapping[str, Kept | None]) -> None:
        """Take in what was read."""
        self._kept.update(found)

    def plan(self, changes: Changes) -> Plan:
        """The changes for all that is left."""
        self._answered, self._plan = {}, Plan()
        is_single = len({self._entries[n].outcome.task_id for n in self._left}) == len(self._left)
        for number in self._left:
            entry = self._entries[number]
            outcome = entry.outcome
            kept = self._kept[outcome.task_id]
            if kept is None or not self._is_current(kept, outcome):
                self._answered[number] = kept is not None and _was_recorded(kept, outcome)
                continue
            row, result = kept.row, entry.result
            is_held = row.owner is not None
            if result is not None and is_single and is_held and _is_plain_success(row, outcome):
                del self._kept[outcome.task_id]
                self._plan.add_success(number, kept, result, changes.now)
                continue
            before = STATUS_LETTERS[row.status]
            settled = row_rules.settle(row, outcome, changes.now)
            change, after = changes.of_outcome(kept, settled, result)
            self._kept[outcome.task_id] = after
            self._plan.add(number, change, before, after, is_single and is_held)
        return self._plan

    def _is_current(self, kept: Kept, outcome: Outcome) -> bool:
        return kept.finished is None and row_rules.is_current(kept.row, outcome, self._owner)

    def take(self, text: str) -> None:
        """Take in what became of the plan; what met something else is left to be planned anew."""
        if not self._answered and not text.strip(DONE):
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
                self.answers[number] = self._answered[number]
        self._left = left
        for task_id in stale:
            self._kept.pop(task_id, None)

    def _task_id(self, number: int) -> str:
        return self._entries[number].outcome.task_id

    @property
    def is_done(self) -> bool:
        """Whether every entry has its answer."""
        return not self._left

    def still_held(self) -> Iterable[Kept]:
        """What the owner holds on to after its outcome: failures that are to be rescheduled."""
        for kept in self._kept.values():
            if kept is not None and kept.finished is None and kept.row.owner == self._owner:
                yield kept


def _is_plain_success(row: Row, outcome: Outcome) -> bool:
    """Most tasks: that they ended well is all that the rules would make of them."""
    return (
        type(outcome) is Succeeded
        and outcome.next_eta is None
        and not row.gates
        and row.unique is None
    )


def _was_recorded(kept: Kept, outcome: Outcome) -> bool:
    # What left no record is not known to have been recorded.
    is_forgotten = kept.finished is not None and not kept.place
    return not is_forgotten and row_rules.was_recorded(kept.row, outcome)


class KnownRows:
    """The tasks this object has claimed and not recorded yet, as they were when it claimed them."""

    def __init__(self) -> None:
        self._owner = ""
        self._kept: dict[str, Kept] = {}

    def take(self, owner: str, entries: list[Entry]) -> dict[str, Kept]:
        """Those that the entries are about. They are forgotten here: what is taken may change."""
        if owner != self._owner:
            # What a former owner held has been given back.
            self._owner, self._kept = owner, {}
        ids = {entry.outcome.task_id for entry in entries}
        return {task_id: self._kept.pop(task_id) for task_id in ids if task_id in self._kept}

    def add(self, owner: str, kept: Iterable[Kept]) -> None:
        """Remember what the owner holds."""
        if owner == self._owner:
            self._kept.update((each.row.id, each) for each in kept)
