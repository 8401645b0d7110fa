"""What this process knows of the queue folder, so that no claim has to list or read it.

It follows names alone, its own and those that `Watch` tells of, in the order in which they came to
be. It may lag behind, and it decides nothing: every step that matters is a rename of a file, which
fails when the index was wrong. Contents are read once, when something has to be claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omniq.storage.file.encoding import Waiter
from omniq.storage.file.file_names import Claimed, Committed, claimed_of, committed_of, id_of
from omniq.storage.file.wakeups import Event
from omniq.storage.ready_queue import ReadyQueue

_PREFIX = len("queue/")


class Index:
    """Tasks by where their file is.

    `unread` are waiting tasks whose order is not known yet, with the inode where it is known.
    """

    def __init__(self) -> None:
        self.ready: ReadyQueue[Waiter] = ReadyQueue()
        self.unread: dict[str, int] = {}
        self.running: dict[str, Claimed] = {}
        self.arrivals = 0
        """How often a task has come to wait that was not ours before."""
        self._done: dict[str, dict[str, Committed]] = {}
        self._own: set[Event] = set()
        self._inodes: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """How many tasks nobody holds."""
        return len(self.ready.items) + len(self.unread)

    def is_waiting(self, task_id: str) -> bool:
        """Whether the task has a file that can be claimed."""
        return task_id in self.ready.items or task_id in self.unread

    def is_live(self, task_id: str) -> bool:
        """Whether the queue folder holds a file of the task."""
        return self.is_waiting(task_id) or task_id in self.running or task_id in self._done

    def waiting_ids(self) -> Iterator[str]:
        """The ids of all tasks that nobody holds."""
        yield from self.ready.items
        yield from self.unread

    def committed(self, task_id: str | None = None) -> list[Committed]:
        """Changes that may have to be carried out still: of one task, or of all."""
        if task_id is not None:
            return list(self._done.get(task_id, {}).values())
        return [committed for those in self._done.values() for committed in those.values()]

    # Own changes: they are told to us once more, and skipped then

    def put(self, waiter: Waiter, now: int) -> None:
        """We have made the task wait."""
        self._own.add((True, f"{waiter.id}.task"))
        self._put(waiter, now)

    def hold(self, claimed: Claimed) -> None:
        """We have claimed the task, or marked it as cancelled, or kept it."""
        self._own.add((True, claimed.path[_PREFIX:]))
        self._hold(claimed)

    def commit(self, committed: Committed) -> None:
        """We have made a change: the task is neither waiting nor held now."""
        self._own.add((True, committed.path[_PREFIX:]))
        self._commit(committed)

    def clear(self, committed: Committed) -> None:
        """We have carried out the change, and removed its file."""
        self._own.add((False, committed.path[_PREFIX:]))
        self._clear(committed)

    def learn(self, waiter: Waiter, now: int) -> None:
        """We have read the order of a task that was unread."""
        if waiter.id in self.unread:
            self._put(waiter, now)

    def put_back(self, waiter: Waiter, now: int) -> None:
        """We have taken the task out to look at it, and not claimed it; others may have since."""
        if not (self.is_waiting(waiter.id) or waiter.id in self.running):
            self.ready.put(waiter, now)

    def drop(self, task_id: str) -> None:
        """The task's file is not where it was."""
        self.ready.discard(task_id)
        self.unread.pop(task_id, None)
        self.running.pop(task_id, None)

    def forget(self, path: str) -> None:
        """This one file was set aside."""
        self._go(path[_PREFIX:])

    # What the folder tells

    def arrive(self, task_id: str) -> None:
        """The task waits, and what ordering needs to know of it has to be read."""
        self.drop(task_id)
        self.unread[task_id] = 0
        self.arrivals += 1

    def follow(self, events: Iterable[Event]) -> set[str]:
        """Take note of names that have come and gone, in order; ids of tasks that others touched."""
        own = self._own
        touched: set[str] = set()
        for event in events:
            if event in own:
                own.discard(event)
                if not touched or _any_id_of(event[1]) not in touched:
                    continue
            # Others came between: then our own changes have to be followed once more as well.
            task_id = self._come(event[1]) if event[0] else self._go(event[1])
            if task_id is not None:
                touched.add(task_id)
        return touched

    def _come(self, name: str) -> str | None:
        if (task_id := id_of(name, ".task")) is not None:
            self.arrive(task_id)
            return task_id
        if (claimed := claimed_of(name)) is not None:
            self._hold(claimed)
            return claimed.id
        if (committed := committed_of(name)) is not None:
            self._commit(committed)
            return committed.id
        return None

    def _go(self, name: str) -> str | None:
        if (committed := committed_of(name)) is not None:
            self._clear(committed)
            return committed.id
        if (task_id := id_of(name, ".task")) is not None:
            self.ready.discard(task_id)
            self.unread.pop(task_id, None)
        elif (claimed := claimed_of(name)) is not None:
            task_id = claimed.id
            if self.running.get(task_id) == claimed:
                del self.running[task_id]
        return task_id

    def replace(self, found: Iterable[tuple[str, int]]) -> None:
        """Begin anew with all names of the folder; what was read stays known if it is the same file."""
        known, inodes = self.ready.items, self._inodes
        self.unread, self.running, self._done, self._inodes = {}, {}, {}, {}
        self._own.clear()
        waiting = set()
        for name, inode in found:
            if (task_id := id_of(name, ".task")) is not None:
                waiting.add(task_id)
                self._inodes[task_id] = inode
                if task_id not in known or inodes.get(task_id) != inode:
                    self.unread[task_id] = inode
                    self.arrivals += 1
            elif (claimed := claimed_of(name)) is not None:
                self.running[claimed.id] = claimed
            elif (committed := committed_of(name)) is not None:
                self._done.setdefault(committed.id, {})[committed.path] = committed
        for task_id in [task_id for task_id in known if task_id not in waiting]:
            self.ready.discard(task_id)
        for task_id in self.unread:
            self.ready.discard(task_id)

    def _put(self, waiter: Waiter, now: int) -> None:
        self.running.pop(waiter.id, None)
        self.unread.pop(waiter.id, None)
        self.ready.put(waiter, now)

    def _hold(self, claimed: Claimed) -> None:
        self.ready.discard(claimed.id)
        self.unread.pop(claimed.id, None)
        self.running[claimed.id] = claimed

    def _commit(self, committed: Committed) -> None:
        self.drop(committed.id)
        self._done.setdefault(committed.id, {})[committed.path] = committed

    def _clear(self, committed: Committed) -> None:
        those = self._done.get(committed.id)
        if those is not None and those.pop(committed.path, None) is not None and not those:
            del self._done[committed.id]


def _any_id_of(name: str) -> str | None:
    if (task_id := id_of(name, ".task")) is not None:
        return task_id
    found = claimed_of(name) or committed_of(name)
    return None if found is None else found.id
