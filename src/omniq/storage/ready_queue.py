"""The order of waiting tasks in memory: heaps of the facts that decide which task is claimed next.

A backend that orders tasks in memory puts every unclaimed task here and takes out what it claims.
The backend decides whether a task may be claimed at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from omniq.gate_rules import Gate

HeapEntry = tuple[int, int, int, str]
"""A task's entry in a heap: sorts in the order in which tasks are claimed, and ends with the id."""

_MAX_STALE = 1_000
"""Stale entries that the heaps may hold beyond the number of tasks."""


class WaitingTask(Protocol):
    """The facts about a task that its order depends on. `parked` is the key of a gate that blocks it."""

    id: str
    seq: int
    queue: str
    visible: int
    gates: tuple[Gate, ...]
    parked: str | None

    @property
    def order(self) -> tuple[int, int, int]:
        """A key that sorts tasks in the order in which they are claimed."""
        ...

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died while it held the task."""
        ...


W = TypeVar("W", bound=WaitingTask)

BlockedGroup = tuple[str, str, bool]
"""Tasks that wait at a gate: the gate's key, their queue, and whether they are suspects."""

Room = Callable[[Gate], int]
"""Returns the number of tasks that a gate admits now."""


class ClaimFilter(msgspec.Struct):
    """Which tasks a claim may take: from `queues` (None for all) except `paused`, suspects or not."""

    queues: Sequence[str] | None
    paused: Collection[str]
    suspects: bool

    def accepts(self, queue: str, is_suspect: bool) -> bool:
        """Whether the claim may take such a task of that queue."""
        is_included = self.queues is None or queue in self.queues
        return is_included and queue not in self.paused and (self.suspects or not is_suspect)


class ReadyQueue(Generic[W]):
    """Unclaimed tasks: due ones by queue, those that are not due yet, those that a gate blocks.

    Taking the next task costs O(log n), regardless of what else waits. A task that is put in again or
    discarded leaves a stale heap entry, which is dropped when it reaches the top. When there are
    many they are dropped all together, because a process that never claims never reaches a top.
    """

    def __init__(self) -> None:
        self.items: dict[str, W] = {}
        self._entries: dict[str, HeapEntry] = {}
        self._ready: dict[str, list[HeapEntry]] = {}
        self._suspects: dict[str, list[HeapEntry]] = {}
        self._delayed: list[HeapEntry] = []
        self._blocked: dict[BlockedGroup, list[HeapEntry]] = {}
        self._stale = 0

    def put(self, item: W, now: int) -> None:
        """Add the task to the heap in which `take_next` will find it."""
        if item.visible > now:
            entry = (0, item.visible, item.seq, item.id)
            heap = self._delayed
        elif item.parked is not None:
            entry = (*item.order, item.id)
            heap = self._blocked.setdefault((item.parked, item.queue, item.is_suspect), [])
        else:
            entry = (*item.order, item.id)
            heaps = self._suspects if item.is_suspect else self._ready
            heap = heaps.setdefault(item.queue, [])
        self.items[item.id] = item
        self._entries[item.id] = entry
        heapq.heappush(heap, entry)

    def discard(self, task_id: str) -> W | None:
        """Remove the task, whichever heap it is in."""
        if self._entries.pop(task_id, None) is not None:
            self._stale += 1
            if self._stale > _MAX_STALE + len(self.items):
                self._drop_stale()
        return self.items.pop(task_id, None)

    def _drop_stale(self) -> None:
        self._stale = 0
        heaps = (*self._ready.values(), *self._suspects.values(), *self._blocked.values())
        for heap in (self._delayed, *heaps):
            heap[:] = [entry for entry in heap if self._entries.get(entry[3]) is entry]
            heapq.heapify(heap)

    def promote(self, due_by: int, now: int) -> None:
        """Move tasks that became due to the heaps that `take_next` reads."""
        while (entry := self._top(self._delayed)) is not None and entry[1] <= due_by:
            self.put(self._take(self._delayed, entry), max(now, due_by))

    def groups_with_room(self, room: Room) -> list[BlockedGroup]:
        """Return the groups of blocked tasks whose gate has room again.

        Their tasks stay in their group during a claim, so that one that the claim cannot take for
        another reason does not use up room.
        """
        for group in [group for group, heap in self._blocked.items() if self._top(heap) is None]:
            del self._blocked[group]
        return [group for group in self._blocked if self._has_room(group, room)]

    def _has_room(self, group: BlockedGroup, room: Room) -> bool:
        entry = self._top(self._blocked[group])
        if entry is None:
            return False
        gate = next(gate for gate in self.items[entry[3]].gates if gate.key == group[0])
        return room(gate) > 0

    def take_next(
        self, wanted: ClaimFilter, groups: Sequence[BlockedGroup], room: Room
    ) -> W | None:
        """Take out the first task that is due and accepted, also from the given blocked groups."""
        best: HeapEntry | None = None
        source: list[HeapEntry] = []
        for heap in self._heaps(wanted, groups, room):
            entry = self._top(heap)
            if entry is not None and (best is None or entry < best):
                best, source = entry, heap
        return None if best is None else self._take(source, best)

    def next_due(self) -> int | None:
        """Return when the first task that is not due yet becomes due."""
        entry = self._top(self._delayed)
        return None if entry is None else entry[1]

    def _heaps(
        self, wanted: ClaimFilter, groups: Sequence[BlockedGroup], room: Room
    ) -> Iterator[list[HeapEntry]]:
        for heaps in (self._ready, self._suspects) if wanted.suspects else (self._ready,):
            for queue in heaps if wanted.queues is None else wanted.queues:
                if queue in heaps and queue not in wanted.paused:
                    yield heaps[queue]
        for group in groups:
            _, queue, is_suspect = group
            if wanted.accepts(queue, is_suspect) and self._has_room(group, room):
                yield self._blocked[group]

    def _top(self, heap: list[HeapEntry]) -> HeapEntry | None:
        """Return the first entry of a heap that is not stale, dropping stale ones before it."""
        while heap:
            # Identity, not equality: a task that was removed and put in again has a new entry.
            if self._entries.get(heap[0][3]) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _take(self, heap: list[HeapEntry], entry: HeapEntry) -> W:
        heapq.heappop(heap)
        del self._entries[entry[3]]
        return self.items.pop(entry[3])
