"""Fairness: the place in line of each task that has a `fair_key`, decided when the task comes to wait.

The tasks of one queue and priority that wait are a line, in order of their `turn`. Each key takes its turns one
after the other, and all keys take them side by side: a task begins at the first instant, from the front of the line
on, at which its key has no other turn, and keeps its key busy for its cost divided by the weight. This is start-time
fair queueing: turns are positions on a virtual clock that stands at the first waiting task, not times of day. A claim
reads rows in the order of their turns, as it does without fair keys; only an enqueue computes turns.

Two kinds of documents are all that is remembered. That of a line says where its front was last seen, and since
when there is always a task in it. That of a key says where its next turn begins, and which earlier ones are free,
because their tasks were cancelled. When a line was empty, all that its keys have taken is forgotten.

A task that is not due, or is enqueued in a caller's transaction, has no place yet, and does not move
the front. When it is due, it sorts before all tasks with a place, so that the next claim sees it first, and gives it
a place behind the turns that its key has taken. A retried task gets its place in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage import row_rules
from omniq.storage.backend import ANY, Document, DocumentChange, DocumentQuery, Section, Wanted
from omniq.storage.row_rules import ROUND, Row

FAIR = "fair"
"""The kind of the documents of lines and keys."""

RETENTION = 600_000_000
"""Microseconds after which a document that was not written is looked at, and deleted if it says nothing."""

_MAX_FREE = 100
"""The most stretches of free turns that a key remembers."""

_STALE = 8 * ROUND
"""How far the front of a line may be ahead of what its document says."""

_Stretch = tuple[int, int]


class Front(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the front of a line was last seen, and since when the line was never seen empty."""

    at: int
    since: int


class Turns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The turns that a key has taken in a line that was never empty `since` then.

    The next one begins at `end`, or in one of the stretches that are `free`, in order.
    """

    since: int
    end: int
    free: tuple[_Stretch, ...] = ()


_decode_front = lenient_decoder(Front, None)
_decode_turns = lenient_decoder(Turns, None)

_Line = tuple[str, int]
"""Queue and priority."""


def _line_name(line: _Line) -> str:
    queue, priority = line
    return f"{priority}/{len(queue)}/{queue}"


def _line_in(name: str) -> tuple[_Line, bool] | None:
    """The line that a document belongs to, and whether it is that of a key; None if omniq has not written it."""
    priority, _, rest = name.partition("/")
    size, _, rest = rest.partition("/")
    if not (priority.removeprefix("-").isdecimal() and size.isdecimal()):
        return None
    queue, rest = rest[: int(size)], rest[int(size) :]
    return (queue, int(priority)), bool(rest)


def take(turns: Turns, front: int, step: int) -> tuple[Turns, int]:
    """Take the next turn of a key, which is that long; returns where it begins.

    What is free before the front is lost. A turn that takes several stretches begins as if it were one that ends
    with the last of them: if it began with the first, the turns between them would begin too early.
    """
    end = max(turns.end, front)
    free = [(max(start, front), stop) for start, stop in turns.free if stop > front]
    left, taken_to = step, end
    while free and left:
        start, stop = free[0]
        taken_to = min(start + left, stop)
        left -= taken_to - start
        if taken_to < stop:
            free[0] = (taken_to, stop)
        else:
            del free[0]
    if left:
        taken_to = end = end + left
    last = row_rules.LAST_PLACE - 1
    return Turns(turns.since, min(end, last), tuple(free)), min(taken_to - step, last)


def give_back(turns: Turns, begin: int, step: int) -> Turns:
    """Free a turn whose task does not run."""
    stop = min(begin + step, turns.end)
    if begin >= stop:
        return turns
    free: list[_Stretch] = []
    for start, end in sorted((*turns.free, (begin, stop))):
        if free and start <= free[-1][1]:
            free[-1] = (free[-1][0], max(free[-1][1], end))
        else:
            free.append((start, end))
    end = turns.end
    if free[-1][1] == end:
        end = free.pop()[0]
    while len(free) > _MAX_FREE:
        _join_nearest(free)
    return Turns(turns.since, end, tuple(free))


def _join_nearest(free: list[_Stretch]) -> None:
    """Join two neighbours at the later instant, so that the key has no turn earlier than it would."""
    at = min(range(len(free) - 1), key=lambda each: free[each + 1][1] - free[each][0])
    (start, middle), (begin, stop) = free[at : at + 2]
    free[at : at + 2] = [(begin - (middle - start), stop)]


class Places:
    """The places in line that one step gives, and those that it frees."""

    def __init__(self, section: Section, changed: Callable[[], Iterable[Row]] = tuple) -> None:
        """`changed` are the rows that wait after this step, and did not before."""
        self._section = section
        self._changed = changed
        self._stored: dict[str, Document | None] = {}
        self._fronts: dict[_Line, Front] = {}
        self._turns: dict[str, Turns] = {}
        self._freed: list[tuple[_Line, str, int, int]] = []

    async def give(self, rows: Sequence[Row]) -> None:
        """Give places to rows that come to wait, in their order; the caller writes the rows."""
        lines: dict[_Line, set[str]] = {}
        names: dict[str, None] = {}
        for row in rows:
            line = row.queue, row.priority
            lines.setdefault(line, set()).update(gate.key for gate in row.gates)
            names[_line_name(line)] = names[_key_name(row)] = None
        await self._read(names)
        for line, gates in lines.items():
            if line not in self._fronts:
                self._fronts[line] = await self._front_of(line, gates)
        for row in rows:
            assert row.fair is not None
            name, front = _key_name(row), self._fronts[row.queue, row.priority]
            turns = self._turns_of(name, front) or Turns(front.since, front.at)
            self._turns[name], turn = take(turns, front.at, row.fair.step)
            row_rules.place(row, turn)

    def free(self, row: Row) -> None:
        """Free the place of a row that leaves the line without a run."""
        if row_rules.is_in_line(row) and row.fair is not None:
            line = row.queue, row.priority
            self._freed.append((line, _key_name(row), row.order[1], row.fair.step))

    async def changes(self) -> list[DocumentChange]:
        """The documents that have changed."""
        freed, self._freed = self._freed, []
        await self._read([each for line, name, _, _ in freed for each in (_line_name(line), name)])
        for line, name, begin, step in freed:
            front = self._fronts.get(line) or self._stored_front(line)
            turns = None if front is None else self._turns_of(name, front)
            if turns is not None:
                self._turns[name] = give_back(turns, begin, step)
        changes = [self._change(name, turns) for name, turns in self._turns.items()]
        for line, front in self._fronts.items():
            known = self._stored_front(line)
            if known is None or known.since != front.since or front.at - known.at >= _STALE:
                # Not compared: enqueuers that see the same line at the same moment do not wait for each other.
                data, due = encode_internal(front), self._section.now + RETENTION
                changes.append(DocumentChange(FAIR, _line_name(line), ANY, data, due))
        return [each for each in changes if each.before != each.after]

    async def _read(self, names: Iterable[str]) -> None:
        unread = [each for each in dict.fromkeys(names) if each not in self._stored]
        if unread:
            found = await self._section.documents(FAIR, unread)
            self._stored.update({name: found.get(name) for name in unread})

    def _stored_front(self, line: _Line) -> Front | None:
        stored = self._stored[_line_name(line)]
        return None if stored is None else _decode_front(stored.data)

    def _turns_of(self, name: str, front: Front) -> Turns | None:
        """What a key has taken; None if the line has been empty since then."""
        if name not in self._turns:
            stored = self._stored[name]
            turns = None if stored is None else _decode_turns(stored.data)
            if turns is None or turns.since != front.since:
                return None
            self._turns[name] = turns
        return self._turns[name]

    def _change(self, name: str, turns: Turns) -> DocumentChange:
        stored = self._stored[name]
        before = None if stored is None else stored.data
        due = self._section.now + RETENTION
        return DocumentChange(FAIR, name, before, encode_internal(turns), due)

    async def _front_of(self, line: _Line, gates: Collection[str]) -> Front:
        """The front of a line, of which also tasks are a part that these gates block."""
        now, known = self._section.now, self._stored_front(line)
        first = await first_in(self._section, line)
        waiting = [] if first is None else [first]
        waiting += [row for row in self._changed() if _is_ready(row, line, now)]
        if gates:
            parked = await self._section.parked(sorted(gates), 1)
            waiting += [row for row in parked if (row.queue, row.priority) == line]
        turns = [row.order[1] for row in waiting if row_rules.is_in_line(row)]
        if known is None:
            return Front(min(turns, default=now), now)
        if not waiting:
            return Front(max(known.at, now), max(known.since + 1, now))
        return Front(max(known.at, min(turns, default=known.at)), known.since)


def _is_ready(row: Row, line: _Line, now: int) -> bool:
    """Whether `first_in` would find the row."""
    is_due = row.visible <= now and row.order[1] >= 0 and not row.crashes
    return is_due and (row.queue, row.priority) == line


def _key_name(row: Row) -> str:
    assert row.fair is not None
    return f"{_line_name((row.queue, row.priority))}/{row.fair.key}"


async def first_in(section: Section, line: _Line) -> Row | None:
    """The first task that waits at a place in the line, or of other tasks among them."""
    queue, priority = line
    wanted = Wanted(due_by=section.now, queues=(queue,), suspects=False, only_looks=True)
    found = await section.candidates(wanted, (-priority, -1, 0), 1)
    return found[0] if found and found[0].priority == priority else None


async def old_documents(section: Section, limit: int) -> tuple[list[DocumentChange], bool]:
    """The changes that delete a page of documents that say nothing any more; whether there may be others."""
    query = DocumentQuery(kind=FAIR, due_by=section.now, limit=limit)
    found = await section.find_documents(query)
    lines = {each.key: _line_in(each.key) for each in found}
    fronts = await _fronts(section, {line[0] for line in lines.values() if line is not None})
    changes: list[DocumentChange] = []
    for each in found:
        line = lines[each.key]
        front = None if line is None else fronts[line[0]]
        after: bytes | None = each.data
        if front is None:
            after = None
        elif line is not None and line[1]:
            turns = _decode_turns(each.data)
            if turns is None or turns.since != front.since or turns.end <= front.at:
                after = None
        changes.append(DocumentChange(FAIR, each.key, each.data, after, section.now + RETENTION))
    return changes, len(found) == limit


async def _fronts(section: Section, lines: Collection[_Line]) -> dict[_Line, Front | None]:
    """The fronts of lines; None of one without waiting tasks."""
    names = {line: _line_name(line) for line in lines}
    stored = await section.documents(FAIR, sorted(names.values()))
    fronts: dict[_Line, Front | None] = {}
    for line, name in names.items():
        first = await first_in(section, line)
        known = _decode_front(stored[name].data) if name in stored else None
        fronts[line] = None
        if first is not None and known is not None:
            turn = first.order[1] if row_rules.is_in_line(first) else known.at
            fronts[line] = Front(max(known.at, turn), known.since)
    return fronts
