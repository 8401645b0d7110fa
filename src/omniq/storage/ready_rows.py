"""The waiting rows of a backend that holds them in memory, in the order in which they are claimed.

Reading the first rows costs O(log n) each, whatever else waits: rows of other queues and functions, rows
that are not due yet, and parked rows are in other heaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from omniq.storage.backend import DELAYED, PARKED, Order, Wanted, place_of
from omniq.storage.row_rules import Row

_Entry = tuple[int, int, int, str]
"""A row in a heap: its order, or for a delayed row when it becomes visible; and its id."""

_Heap = list[_Entry]
_Lane = tuple[str, str, bool]
"""Queue ("" for all), function, and whether the rows are suspects."""

_MAX_STALE = 1_000
"""Stale entries that the heaps may hold beyond the number of rows."""


class ReadyRows:
    """All rows that no owner holds. A row that is removed leaves stale entries, dropped later."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._entries: dict[str, _Entry] = {}
        # By function for claims from all queues, and by queue and function for the others. Each is
        # built by the first claim that needs it.
        self._of_all_queues: dict[_Lane, _Heap] | None = None
        self._by_queue: dict[_Lane, _Heap] | None = None
        self._delayed: _Heap = []
        self._parked: dict[str, dict[_Lane, _Heap]] = {}
        self._stale = 0

    # Changing

    def put(self, row: Row, now: int) -> None:
        """Add a row, or replace it by its new state."""
        self.discard(row.id)
        self.rows[row.id] = row
        place = place_of(row, now)
        if place == DELAYED:
            entry = (0, row.visible, row.seq, row.id)
            heapq.heappush(self._delayed, entry)
        else:
            entry = (*row.order, row.id)
            if place == PARKED:
                lanes = self._parked.setdefault(row.parked or "", {})
                heapq.heappush(lanes.setdefault(_lane(row, row.queue), []), entry)
            else:
                self._push_ready(row, entry)
        self._entries[row.id] = entry

    def _push_ready(self, row: Row, entry: _Entry) -> None:
        if self._of_all_queues is not None:
            heapq.heappush(self._of_all_queues.setdefault(_lane(row, ""), []), entry)
        if self._by_queue is not None:
            heapq.heappush(self._by_queue.setdefault(_lane(row, row.queue), []), entry)

    def discard(self, task_id: str) -> None:
        """Remove a row, if it is here."""
        if self.rows.pop(task_id, None) is None:
            return
        del self._entries[task_id]
        self._stale += 1
        if self._stale > _MAX_STALE + len(self.rows):
            self._drop_stale()

    def _drop_stale(self) -> None:
        self._stale = 0
        parked = [heap for lanes in self._parked.values() for heap in lanes.values()]
        ready = [
            heap
            for lanes in (self._of_all_queues, self._by_queue)
            for heap in (lanes or {}).values()
        ]
        for heap in (self._delayed, *parked, *ready):
            heap[:] = [entry for entry in heap if self._entries.get(entry[3]) is entry]
            heapq.heapify(heap)
        self._parked = {
            key: kept
            for key, lanes in self._parked.items()
            if (kept := {lane: heap for lane, heap in lanes.items() if heap})
        }
        for lanes in (self._of_all_queues, self._by_queue):
            for lane in [lane for lane, heap in (lanes or {}).items() if not heap]:
                del (lanes or {})[lane]

    def promote(self, due_by: int) -> None:
        """Move rows that have become visible to where claims find them."""
        while (entry := self._top(self._delayed)) is not None and entry[1] <= due_by:
            heapq.heappop(self._delayed)
            row = self.rows.pop(entry[3])
            del self._entries[row.id]
            self.put(row, max(due_by, row.visible))

    # Reading

    def next_due(self) -> int | None:
        """When the first delayed row becomes visible."""
        entry = self._top(self._delayed)
        return None if entry is None else entry[1]

    def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        """The first rows that `wanted` accepts, in claim order, behind `after`."""
        lanes = [self._sorted(heap, after) for heap in self._lanes(wanted)]
        merged = lanes[0] if len(lanes) == 1 else heapq.merge(*lanes)
        found: list[Row] = []
        for entry in merged:
            row = self.rows[entry[3]]
            if row.visible <= wanted.due_by:
                found.append(row)
                if len(found) == limit:
                    break
        return found

    def _lanes(self, wanted: Wanted) -> Iterator[_Heap]:
        lanes = self._ready_lanes(of_all_queues=wanted.queues is None and not wanted.paused)
        runnable = wanted.runnable
        for (queue, func_path, is_suspect), heap in lanes.items():
            if (
                heap
                and (not is_suspect or wanted.suspects)
                and (runnable is None or runnable.accepts(func_path))
                and (wanted.queues is None or queue in wanted.queues)
                and queue not in wanted.paused
            ):
                yield heap

    def _ready_lanes(self, *, of_all_queues: bool) -> dict[_Lane, _Heap]:
        lanes = self._of_all_queues if of_all_queues else self._by_queue
        if lanes is None:
            lanes = {}
            others = {entry[3] for entry in self._delayed if self._entries.get(entry[3]) is entry}
            for row in self.rows.values():
                if row.parked is None and row.id not in others:
                    lane = _lane(row, "" if of_all_queues else row.queue)
                    lanes.setdefault(lane, []).append(self._entries[row.id])
            for heap in lanes.values():
                heapq.heapify(heap)
            if of_all_queues:
                self._of_all_queues = lanes
            else:
                self._by_queue = lanes
        return lanes

    def parked(self, keys: Iterable[str], limit: int) -> Iterator[Row]:
        """The first rows of each gate, queue and function."""
        for key in keys:
            for heap in self._parked.get(key, {}).values():
                for number, entry in enumerate(self._sorted(heap, None), start=1):
                    yield self.rows[entry[3]]
                    if number == limit:
                        break

    def _sorted(self, heap: _Heap, after: Order | None) -> Iterator[_Entry]:
        """The entries of a heap in order, without changing it; stale ones at its top are dropped."""
        if self._top(heap) is None:
            return
        entries = self._entries
        # The smallest entries first: an entry's followers in the order are among its two children.
        reached = [(heap[0], 0)]
        while reached:
            entry, index = heapq.heappop(reached)
            if entries.get(entry[3]) is entry and (after is None or entry[:3] > after):
                yield entry
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(reached, (heap[child], child))

    def _top(self, heap: _Heap) -> _Entry | None:
        while heap:
            # Identity, not equality: a row that was removed and put in again has a new entry.
            if self._entries.get(heap[0][3]) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
        return None


def _lane(row: Row, queue: str) -> _Lane:
    return (queue, row.func_path, row.is_suspect)
