"""The waiting rows of a backend that holds them in memory, in the order in which they are claimed.

Reading the first rows costs O(log n) each, whatever else waits: rows of other queues and functions, rows
that are not due yet, and parked rows are elsewhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from omniq.storage.backend import Order, Wanted
from omniq.storage.row_rules import Row

_Entry = tuple[int, int, int, str]
"""A row in a lane: its order and its id. Of a delayed row, when it becomes visible instead."""

_Entries = dict[str, _Entry]
_LaneKey = tuple[str, bool]
"""Function, and whether the rows are suspects."""

_AHEAD = 20
"""Rows that are sorted beyond those that are read, since the next call reads them."""

_MAX_STALE = 1_000
"""Stale entries that the lanes may hold beyond the number of rows."""


class _Lane:
    """Rows in claim order: the first ones sorted, as far as they were read; all others behind them.

    Most rows are put in in order: those are in a list, and only the others in a heap.
    """

    __slots__ = ("_heap", "_next", "_run", "_sorted", "_start")

    def __init__(self) -> None:
        self._sorted: list[_Entry] = []
        self._start = 0
        self._run: list[_Entry] = []
        self._next = 0
        self._heap: list[_Entry] = []

    def push(self, entry: _Entry) -> None:
        """Add a row."""
        if len(self._sorted) > self._start and entry < self._sorted[-1]:
            insort(self._sorted, entry, self._start)
        elif not self._run or self._run[-1] < entry:
            self._run.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def first(self, entries: _Entries, after: Order | None, limit: int) -> list[_Entry]:
        """The first rows behind `after`, in order. `entries` has those that are not stale."""
        self._drop_first_stale(entries)
        position = self._start
        if after is not None:
            position = bisect_right(self._sorted, after, self._start, key=_order_in)
        elif limit == 1 and position < len(self._sorted):
            return [self._sorted[position]]
        found: list[_Entry] = []
        while True:
            end = position + limit - len(found)
            if end > len(self._sorted) and (self._run or self._heap):
                self._sort(end - len(self._sorted) + _AHEAD)
                if after is not None and not found:
                    # A caller that skips rows that nothing has read yet.
                    position = bisect_right(self._sorted, after, position, key=_order_in)
                    continue
            found += [
                entry for entry in self._sorted[position:end] if entries.get(entry[3]) is entry
            ]
            position = end
            if len(found) == limit or end > len(self._sorted):
                return found

    def read(self, entries: _Entries, after: Order | None, size: int) -> Iterator[_Entry]:
        """All rows behind `after`, in order, of which `size` are read at a time."""
        while page := self.first(entries, after, size):
            yield from page
            if len(page) < size:
                return
            after = _order_in(page[-1])

    def _sort(self, count: int) -> None:
        """Have that many more rows sorted."""
        run, heap = self._run, self._heap
        while heap and count:
            if self._next < len(run) and run[self._next] < heap[0]:
                self._sorted.append(run[self._next])
                self._next += 1
            else:
                self._sorted.append(heapq.heappop(heap))
            count -= 1
        self._sorted += run[self._next : self._next + count]
        self._next = min(self._next + count, len(run))
        if self._next > _MAX_STALE or self._next == len(run):
            del run[: self._next]
            self._next = 0

    def _drop_first_stale(self, entries: _Entries) -> None:
        start = self._start
        for entry in islice(self._sorted, start, None):
            # Identity, not equality: a row that was removed and put in again has a new entry.
            if entries.get(entry[3]) is entry:
                break
            start += 1
        if start > _MAX_STALE or start == len(self._sorted):
            del self._sorted[:start]
            start = 0
        self._start = start

    def drop_stale(self, entries: _Entries) -> bool:
        """Drop all stale entries; returns whether any others are left."""
        waiting = [*self._sorted[self._start :], *self._run[self._next :], *self._heap]
        self._run = sorted(entry for entry in waiting if entries.get(entry[3]) is entry)
        self._sorted, self._heap = [], []
        self._start = self._next = 0
        return bool(self._run)


_Lanes = dict[str, dict[_LaneKey, _Lane]]
"""Lanes by their queue; "" for those of several queues together."""

_ALL: frozenset[str] = frozenset()


class ReadyRows:
    """All rows that no owner holds. A row that is removed leaves stale entries, dropped later."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._entries: _Entries = {}
        # By queue and function (None), and by function alone for claims from all queues but those that are
        # paused. Each is built by the first claim that needs it.
        self._ready: dict[frozenset[str] | None, _Lanes] = {}
        self._delayed: list[_Entry] = []
        self._parked: dict[str, _Lanes] = {}
        self._stale = 0

    # Changing

    def put(self, row: Row, now: int) -> None:
        """Add a row, or replace it by its new state."""
        if self._stale > _MAX_STALE + len(self.rows):
            self._drop_stale()
        if row.id in self.rows:
            self._stale += 1
        self.rows[row.id] = row
        if row.visible > now:
            entry = (0, row.visible, row.seq, row.id)
            heapq.heappush(self._delayed, entry)
        else:
            entry = (*row.order, row.id)
            if row.parked is not None:
                lanes = self._parked.get(row.parked)
                if lanes is None:
                    lanes = self._parked[row.parked] = {}
                _push(lanes, row, row.queue, entry)
            else:
                for paused, lanes in self._ready.items():
                    _push_ready(lanes, row, paused, entry)
        self._entries[row.id] = entry

    def discard(self, task_id: str) -> None:
        """Remove a row, if it is here."""
        if self.rows.pop(task_id, None) is not None:
            del self._entries[task_id]
            self._stale += 1

    def discard_all(self, ids: Collection[str]) -> None:
        """Remove rows that are here."""
        rows, entries = self.rows, self._entries
        for task_id in ids:
            del rows[task_id], entries[task_id]
        self._stale += len(ids)

    def _drop_stale(self) -> None:
        self._stale = 0
        self._delayed = [each for each in self._delayed if self._entries.get(each[3]) is each]
        heapq.heapify(self._delayed)
        for lanes in (*self._ready.values(), *self._parked.values()):
            for queue, its_lanes in list(lanes.items()):
                left = {
                    key: each for key, each in its_lanes.items() if each.drop_stale(self._entries)
                }
                if left:
                    lanes[queue] = left
                else:
                    del lanes[queue]
        self._parked = {key: lanes for key, lanes in self._parked.items() if lanes}

    def promote(self, due_by: int) -> None:
        """Move rows that have become visible to where claims find them."""
        while (entry := self._first_delayed()) is not None and entry[1] <= due_by:
            heapq.heappop(self._delayed)
            row = self.rows.pop(entry[3])
            del self._entries[row.id]
            self.put(row, max(due_by, row.visible))

    def _first_delayed(self) -> _Entry | None:
        while self._delayed:
            if self._entries.get(self._delayed[0][3]) is self._delayed[0]:
                return self._delayed[0]
            heapq.heappop(self._delayed)
        return None

    # Reading

    def next_due(self) -> int | None:
        """When the first delayed row becomes visible."""
        entry = self._first_delayed()
        return None if entry is None else entry[1]

    def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        """The first rows that `wanted` accepts, in claim order, behind `after`."""
        lanes = list(self._wanted_lanes(wanted))
        rows, due_by = self.rows, wanted.due_by
        if len(lanes) == 1:
            first = lanes[0].first(self._entries, after, limit)
            found = [row for entry in first if (row := rows[entry[3]]).visible <= due_by]
            if len(found) == len(first):
                return found
        size = max(2, 2 * limit // len(lanes)) if lanes else 0
        merged = heapq.merge(*(lane.read(self._entries, after, size) for lane in lanes))
        due = (row for entry in merged if (row := rows[entry[3]]).visible <= due_by)
        return list(islice(due, limit))

    def _wanted_lanes(self, wanted: Wanted) -> Iterator[_Lane]:
        if wanted.queues is None:
            lanes = self._ready_lanes(wanted.paused)
            queues: Iterable[str] = ("",)
        else:
            lanes = self._ready_lanes(None)
            queues = (queue for queue in dict.fromkeys(wanted.queues) if queue not in wanted.paused)
        runnable = wanted.runnable
        for queue in queues:
            for (func_path, is_suspect), lane in lanes.get(queue, {}).items():
                if (not is_suspect or wanted.suspects) and (
                    runnable is None or runnable.accepts(func_path)
                ):
                    yield lane

    def _ready_lanes(self, paused: frozenset[str] | None) -> _Lanes:
        if paused not in self._ready:
            # Queues have been paused or resumed: the lanes without those that were paused before are not needed.
            self._ready = {
                each: lanes for each, lanes in self._ready.items() if each in (None, _ALL)
            }
            lanes: _Lanes = {}
            delayed = {each[3] for each in self._delayed if self._entries.get(each[3]) is each}
            for row in self.rows.values():
                if row.parked is None and row.id not in delayed:
                    _push_ready(lanes, row, paused, self._entries[row.id])
            self._ready[paused] = lanes
        return self._ready[paused]

    def parked(self, keys: Iterable[str], limit: int) -> Iterator[Row]:
        """The first rows of each gate, queue and function."""
        for key in keys:
            for lanes in self._parked.get(key, {}).values():
                for lane in lanes.values():
                    for entry in lane.first(self._entries, None, limit):
                        yield self.rows[entry[3]]


def _order_in(entry: _Entry) -> Order:
    return entry[:3]


def _push(lanes: _Lanes, row: Row, queue: str, entry: _Entry) -> None:
    its_lanes = lanes.get(queue)
    if its_lanes is None:
        its_lanes = lanes[queue] = {}
    key = (row.func_path, row.crashes > 0)
    lane = its_lanes.get(key)
    if lane is None:
        lane = its_lanes[key] = _Lane()
    lane.push(entry)


def _push_ready(lanes: _Lanes, row: Row, paused: frozenset[str] | None, entry: _Entry) -> None:
    if paused is None:
        _push(lanes, row, row.queue, entry)
    elif row.queue not in paused:
        _push(lanes, row, "", entry)
