"""Which waiting task comes next: heaps over what ordering needs to know, and nothing else.

A backend that keeps its order in memory puts every task here that nobody holds, and takes out what
it claims. Whether a task may be claimed at all is the backend's to decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from omniq.gate_rules import Gate

Place = tuple[int, int, int, str]
"""A task's place in a heap: sorts as tasks are to be taken, and ends in the id."""


_MANY_STALE = 1_000


class Waiting(Protocol):
    """What ordering needs to know of a task."""

    id: str
    seq: int
    queue: str
    visible: int
    gates: tuple[Gate, ...]
    parked: str | None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts tasks as they are to be claimed."""
        ...

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died while it held the task."""
        ...


W = TypeVar("W", bound=Waiting)

Lot = tuple[str, str, bool]
"""Where blocked tasks are parked: the gate's key, the queue, and whether they are suspects."""

Room = Callable[[Gate], int]
"""Says how many tasks a gate would let in."""


class Wanted(msgspec.Struct):
    """What a claim is for: these queues (None is all) but for paused ones, with suspects or not."""

    queues: Sequence[str] | None
    paused: Collection[str]
    suspects: bool

    def has(self, queue: str, is_suspect: bool) -> bool:
        """Whether a task of that queue is wanted."""
        is_asked_for = self.queues is None or queue in self.queues
        return is_asked_for and queue not in self.paused and (self.suspects or not is_suspect)


class ReadyQueue(Generic[W]):
    """Waiting tasks: those that are due by queue, those that are not, those a gate holds up.

    Taking the next one costs O(log n), whatever waits beside it. A task that is put in again, or
    discarded, leaves a stale place behind that is dropped when it comes to the top, or with all
    others when there are many: whoever never takes anything has no top to look at.
    """

    def __init__(self) -> None:
        self.items: dict[str, W] = {}
        self._places: dict[str, Place] = {}
        self._ready: dict[str, list[Place]] = {}
        self._suspects: dict[str, list[Place]] = {}
        self._delayed: list[Place] = []
        self._parked: dict[Lot, list[Place]] = {}
        self._stale = 0

    def put(self, item: W, now: int) -> None:
        """File the task where `take_next` will look for it."""
        if item.visible > now:
            place = (0, item.visible, item.seq, item.id)
            heap = self._delayed
        elif item.parked is not None:
            place = (*item.order, item.id)
            heap = self._parked.setdefault((item.parked, item.queue, item.is_suspect), [])
        else:
            place = (*item.order, item.id)
            heaps = self._suspects if item.is_suspect else self._ready
            heap = heaps.setdefault(item.queue, [])
        self.items[item.id] = item
        self._places[item.id] = place
        heapq.heappush(heap, place)

    def discard(self, task_id: str) -> W | None:
        """Forget the task, wherever it is filed."""
        if self._places.pop(task_id, None) is not None:
            self._stale += 1
            if self._stale > _MANY_STALE + len(self.items):
                self._drop_stale()
        return self.items.pop(task_id, None)

    def _drop_stale(self) -> None:
        self._stale = 0
        heaps = (*self._ready.values(), *self._suspects.values(), *self._parked.values())
        for heap in (self._delayed, *heaps):
            heap[:] = [place for place in heap if self._places.get(place[3]) is place]
            heapq.heapify(heap)

    def promote(self, due_by: int, now: int) -> None:
        """Move what has come due to where `take_next` looks."""
        while (place := self._top(self._delayed)) is not None and place[1] <= due_by:
            self.put(self._take(self._delayed, place), max(now, due_by))

    def lots_with_room(self, room: Room) -> list[Lot]:
        """Where tasks are parked whose gate has room again; they take part in a claim as they are.

        A task that the claim cannot take for another reason so keeps nobody out of the free room.
        """
        for lot in [lot for lot, heap in self._parked.items() if self._top(heap) is None]:
            del self._parked[lot]
        return [lot for lot in self._parked if self._has_room(lot, room)]

    def _has_room(self, lot: Lot, room: Room) -> bool:
        place = self._top(self._parked[lot])
        if place is None:
            return False
        gate = next(gate for gate in self.items[place[3]].gates if gate.key == lot[0])
        return room(gate) > 0

    def take_next(self, wanted: Wanted, lots: Sequence[Lot], room: Room) -> W | None:
        """Take out the first task that is due and wanted, of those parked in `lots` as well."""
        best: Place | None = None
        source: list[Place] = []
        for heap in self._heaps(wanted, lots, room):
            place = self._top(heap)
            if place is not None and (best is None or place < best):
                best, source = place, heap
        return None if best is None else self._take(source, best)

    def next_due(self) -> int | None:
        """When the first task that is not due yet will be."""
        place = self._top(self._delayed)
        return None if place is None else place[1]

    def _heaps(self, wanted: Wanted, lots: Sequence[Lot], room: Room) -> Iterator[list[Place]]:
        for heaps in (self._ready, self._suspects) if wanted.suspects else (self._ready,):
            for queue in heaps if wanted.queues is None else wanted.queues:
                if queue in heaps and queue not in wanted.paused:
                    yield heaps[queue]
        for lot in lots:
            _, queue, is_suspect = lot
            if wanted.has(queue, is_suspect) and self._has_room(lot, room):
                yield self._parked[lot]

    def _top(self, heap: list[Place]) -> Place | None:
        """The first place of a heap that still holds, dropping those that do not."""
        while heap:
            # Identity, not equality: a task that went away and came back has a new place.
            if self._places.get(heap[0][3]) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _take(self, heap: list[Place], place: Place) -> W:
        heapq.heappop(heap)
        del self._places[place[3]]
        return self.items.pop(place[3])
