"""Index: the names in the queue folder, in memory, so that a claim need not list the folder.

It follows changes of names: those of this process, and those that `FolderWatch` reports, in the
order in which they happened. It may be out of date, and it decides nothing: every step that matters
is a rename of a file, which fails when the index was wrong. A file's contents are read once, before
a claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omniq.storage.file.encoding import IndexEntry
from omniq.storage.file.file_names import Claimed, Committed, claimed_of, committed_of, id_of
from omniq.storage.file.wakeups import Event
from omniq.storage.ready_queue import ReadyQueue

_PREFIX = len("queue/")


class Index:
    """The live tasks by state: waiting (`ready` and `unread`), running, or in a committed change.

    `unread` are waiting tasks whose order is not known yet, with their inode number, or 0.
    """

    def __init__(self) -> None:
        self.ready: ReadyQueue[IndexEntry] = ReadyQueue()
        self.unread: dict[str, int] = {}
        self.running: dict[str, Claimed] = {}
        self.arrivals = 0
        """Counts the waiting tasks that other processes have added."""
        self._done: dict[str, dict[str, Committed]] = {}
        self._own_events: set[Event] = set()
        self._inodes: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """The number of waiting tasks."""
        return len(self.ready.items) + len(self.unread)

    def is_waiting(self, task_id: str) -> bool:
        """Whether the task has a file that can be claimed."""
        return task_id in self.ready.items or task_id in self.unread

    def is_live(self, task_id: str) -> bool:
        """Whether the queue folder holds a file of the task."""
        return self.is_waiting(task_id) or task_id in self.running or task_id in self._done

    def waiting_ids(self) -> Iterator[str]:
        """The ids of all waiting tasks."""
        yield from self.ready.items
        yield from self.unread

    def committed(self, task_id: str | None = None) -> list[Committed]:
        """Committed changes that may not be finished yet: of one task, or of all."""
        if task_id is not None:
            return list(self._done.get(task_id, {}).values())
        return [committed for changes in self._done.values() for committed in changes.values()]

    # Changes by this process. The watch reports them too, and `apply_events` then skips them

    def put(self, entry: IndexEntry, now: int) -> None:
        """This process has made the task wait."""
        self._own_events.add((True, f"{entry.id}.task"))
        self._put(entry, now)

    def hold(self, claimed: Claimed) -> None:
        """This process has claimed the task, or has renamed the file of a claimed task."""
        self._own_events.add((True, claimed.path[_PREFIX:]))
        self._hold(claimed)

    def commit(self, committed: Committed) -> None:
        """This process has committed a change: the task is neither waiting nor held now."""
        self._own_events.add((True, committed.path[_PREFIX:]))
        self._commit(committed)

    def clear(self, committed: Committed) -> None:
        """This process has finished the change and removed its `.done` file."""
        self._own_events.add((False, committed.path[_PREFIX:]))
        self._clear(committed)

    def set_order(self, entry: IndexEntry, now: int) -> None:
        """This process has read the order of a task that was unread."""
        if entry.id in self.unread:
            self._put(entry, now)

    def put_back(self, entry: IndexEntry, now: int) -> None:
        """Put back a task that was taken out and not claimed, unless it has changed since."""
        if not (self.is_waiting(entry.id) or entry.id in self.running):
            self.ready.put(entry, now)

    def drop(self, task_id: str) -> None:
        """Remove a task whose file is no longer under the known name."""
        self.ready.discard(task_id)
        self.unread.pop(task_id, None)
        self.running.pop(task_id, None)

    def remove_path(self, path: str) -> None:
        """Remove a file that was moved to `corrupt/`."""
        self._name_removed(path[_PREFIX:])

    # Changes by other processes

    def add_unread(self, task_id: str) -> None:
        """Add a waiting task whose order has to be read."""
        self.drop(task_id)
        self.unread[task_id] = 0
        self.arrivals += 1

    def apply_events(self, events: Iterable[Event]) -> set[str]:
        """Apply events in order; returns the ids of tasks that other processes have changed."""
        own = self._own_events
        touched: set[str] = set()
        for event in events:
            if event in own:
                own.discard(event)
                if not touched or _task_id_of(event[1]) not in touched:
                    continue
            # After a change by another process, this process's later ones must be applied again.
            task_id = self._name_added(event[1]) if event[0] else self._name_removed(event[1])
            if task_id is not None:
                touched.add(task_id)
        return touched

    def _name_added(self, name: str) -> str | None:
        if (task_id := id_of(name, ".task")) is not None:
            self.add_unread(task_id)
            return task_id
        if (claimed := claimed_of(name)) is not None:
            self._hold(claimed)
            return claimed.id
        if (committed := committed_of(name)) is not None:
            self._commit(committed)
            return committed.id
        return None

    def _name_removed(self, name: str) -> str | None:
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
        """Rebuild the index from all names of the folder; entries of unchanged files are reused."""
        known, inodes = self.ready.items, self._inodes
        self.unread, self.running, self._done, self._inodes = {}, {}, {}, {}
        self._own_events.clear()
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

    def _put(self, entry: IndexEntry, now: int) -> None:
        self.running.pop(entry.id, None)
        self.unread.pop(entry.id, None)
        self.ready.put(entry, now)

    def _hold(self, claimed: Claimed) -> None:
        self.ready.discard(claimed.id)
        self.unread.pop(claimed.id, None)
        self.running[claimed.id] = claimed

    def _commit(self, committed: Committed) -> None:
        self.drop(committed.id)
        self._done.setdefault(committed.id, {})[committed.path] = committed

    def _clear(self, committed: Committed) -> None:
        changes = self._done.get(committed.id)
        if changes is not None and changes.pop(committed.path, None) is not None and not changes:
            del self._done[committed.id]


def _task_id_of(name: str) -> str | None:
    if (task_id := id_of(name, ".task")) is not None:
        return task_id
    found = claimed_of(name) or committed_of(name)
    return None if found is None else found.id
