"""Writes: change many names in one step, of which others see all or nothing, with renames alone.

A write of the nonce W changes names of tasks and documents in these steps:

    1 write the new records (and sync them): of new names as <name>.new, of changed ones as
      parts/<key>.W.part; the first file of the write is also tasks/W.open
    2 check that nothing else has the keys of the new names
    3 rename every old name to <name>.W.old; if one is gone, others have changed it: undo
    4 rename the tasks that are claimed to their new names; if one is gone: undo
    5 rename W.open to W.done: this commits
    6 rename the parts and the .new names to their final names, remove the .old names
    7 sync the folders, then remove W.done

A process that needs a name that a write has taken waits for it. If the write makes no progress for a moment,
the process finishes the write if there is a W.done, and otherwise removes W.open, so that the write
cannot be committed any more, and renames the .old names back. So a process that dies in any step delays
others for a moment, and no lock outlives it. Finishing or undoing twice, or late, is harmless: every
name is used once, so each rename succeeds once.

    after a crash in      state                      what follows
    steps 1 to 4          not committed              undone
    steps 5 to 7          committed                  finished

Claims need no .old name: one that was made and not committed is given back with the other claims of the
process that died.

Without W.open and W.done, what is left of W is undone: W.open is made before any .old name, and W.done
is removed after the last of them, and after the sync.

A write of one old name needs no W.open: the rename of that name, to <name>.W.done, commits. A write of
one new name is committed by the rename from .new to the final name, and undone by its removal.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from omniq.clock import Clock
from omniq.failpoints import hit
from omniq.storage.backend import Document, Moved
from omniq.storage.file import file_names as names
from omniq.storage.file.encoding import (
    EndedTask,
    NewerRecord,
    NotARecord,
    WaitingRow,
    decode,
    encode,
)
from omniq.storage.file.file_names import DeadName, DocumentName, RowName, WriteName, path_of
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import content_of, open_shared, pack, unpack_one
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.row_rules import Row

_PATIENCE = 100
"""How often a process looks, in pauses of half a millisecond, whether a write of another has made progress."""

_ABANDONED_AFTER = 2 * 10**9
"""Nanoseconds after which a write that has taken names, and is not committed, counts as abandoned."""

_SLOWEST_SYNC = 60 * 10**9
"""Nanoseconds that a write may need for a file: as long, one that has taken no name is left alone."""


class Change(msgspec.Struct, gc=False):
    """A name that a write adds (it has no `source`), changes, or removes (it has no `target`).

    `record` is the new record; without one the name alone changes. An ended task has no `target`: its
    folders follow from the record. `moves` are the paths of the new record before the commit, each with
    the path after it. `held_at` is the path of the source while the write has it. With `is_erased` the
    old record is overwritten.
    """

    key: str
    source: names.Name | None = None
    target: RowName | DocumentName | None = None
    record: Row | Document | EndedTask | None = None
    is_claim: bool = False
    is_erased: bool = False
    moves: list[tuple[str, str]] = []
    held_at: str = ""

    def place_in(self, content: str, write: str) -> None:
        """Name what becomes of a new record that the write has in that content."""
        if isinstance(self.record, Row):
            # A renewal reads it from the name.
            marks = "c" if self.record.cancel_requested else ""
            self.target = names.name_of(self.record, content, marks=marks)
        elif isinstance(self.record, Document):
            if names.document_key(self.record.kind, self.record.key) != self.key:
                raise NotARecord(f"the document {self.record.kind} {self.record.key}")
            self.target = DocumentName(self.key, content, self.record.due)
        path = f"tasks/{self.target}"
        if self.source is None:
            self.moves = [(f"{path}.new", path)]
            return
        part = names.part_path(self.key, write)
        self.moves = [(part, path)]
        if isinstance(self.record, EndedTask):
            self.moves = [(part, names.result_path(self.key))] if self.record.row.result_ttl else []
            if self.record.letter is not None:
                part = names.part_path(self.key, write, "dead")
                self.moves.append((part, names.dead_path(self.key)))


class Write(msgspec.Struct):
    """What one write changes."""

    nonce: str
    changes: list[Change] = []
    is_committed: bool = False

    @property
    def has_marker(self) -> bool:
        """Whether several names change, so that the rename of a marker must commit them together."""
        return len(self.changes) > 1


class Writes:
    """Commits the writes of this process, and finishes or undoes those of others."""

    def __init__(self, files: TaskFiles, clock: Clock) -> None:
        self._files = files
        self._disk: Disk = files.disk
        self._boot = boot_mark(clock)
        self._unsynced: set[str] = set()
        self._leftovers: dict[str, str | None] = {}
        self._pause = threading.Event()

    # Writing

    def commit(self, write: Write, is_occupied: Callable[[str], bool]) -> None:
        """Make all the changes, or raise `Moved` if others have changed a name meanwhile.

        `is_occupied`: whether a task that has ended still has the id of a new one.
        """
        self._check(write)
        self._unsynced.add("tasks")
        first = write.changes[0]
        if not write.has_marker and isinstance(first.target, RowName) and first.record is None:
            if not self.claim(first):
                self._raise_moved(first.key)
            return
        try:
            self._prepare(write)
            self._announce(write, is_occupied)
            taken = [
                each for each in write.changes if each.source is not None and not each.is_claim
            ]
            # In an order in which two writes do not block each other.
            for each in sorted(taken, key=attrgetter("key")):
                self._take(write, each)
            for each in write.changes:
                if each.is_claim:
                    if not self.claim(each):
                        self._undo(write.nonce, write.changes)
                        self._raise_moved(each.key)
                    hit("file.claim.after_rename")
            self._decide(write)
        except Exception:
            if not write.is_committed:
                self._undo(write.nonce, write.changes)
            raise
        if first.source is None and not write.has_marker:
            return
        try:
            if any(each.source is not None for each in write.changes):
                hit("file.record.after_commit")
            self._apply(write.changes)
        except BaseException:
            # Committed, and not finished. The index does not have this write's own new names. With them,
            # a repeat meets this write and finishes it, instead of adding its tasks again.
            self._files.distrust_index()
            raise
        if write.has_marker:
            self._leftovers[_marker(write.nonce, "done")] = None

    def _check(self, write: Write) -> None:
        """Raise `Moved` before anything is written, if the index knows that a name has changed."""
        if any(each.source is not None for each in write.changes):
            self._files.refresh()
        for each in write.changes:
            if self._has_moved(each):
                self._raise_moved(each.key)

    def _has_moved(self, each: Change) -> bool:
        index = self._files.index
        current = index.current(each.key)
        if each.source is None:
            return current is not None or each.key in index.taken
        return current != each.source and not isinstance(each.source, DeadName)

    def _raise_moved(self, key: str) -> None:
        """Wait until what has moved is settled, so that the next try can succeed."""
        self._files.refresh()
        self.settle_key(key)
        raise Moved

    def _prepare(self, write: Write) -> None:
        """Write the new records, each under the name that it has until the commit."""
        by_key = {each.key: each for each in write.changes if each.record is not None}
        renames: dict[str, str] | None = None
        if write.has_marker:
            renames = {
                str(each.source): str(each.target)
                for each in write.changes
                if each.record is None and each.target is not None and not each.is_claim
            }
        elif not by_key:
            return
        files: list[tuple[list[str], bytes]] = []
        records = ((key, encode(each.record)) for key, each in by_key.items())
        for content, keys, data in pack(write.nonce, records, renames):
            paths = [_marker(write.nonce)] if write.has_marker and not files else []
            for key in keys:
                by_key[key].place_in(content, write.nonce)
                paths += [path for path, _ in by_key[key].moves]
            files.append((paths, data))
        has_new = any(each.source is None for each in write.changes)
        if has_new:
            hit("file.enqueue.before_link")
        self._disk.write_all(files)
        if has_new:
            hit("file.enqueue.after_link")
        if any(each.source is not None for each in by_key.values()):
            hit("file.record.after_part")

    def _announce(self, write: Write, is_occupied: Callable[[str], bool]) -> None:
        """Check that nothing else has the keys of the new names, which others see now."""
        new = [each for each in write.changes if each.source is None]
        if not new:
            return
        # A later announcement sees this one, so one of two notices the other.
        self._files.refresh()
        announced = self._files.index.new
        for each in new:
            for other in list(announced[each.key].values()) if each.key in announced else ():
                if other.write != write.nonce and (
                    write.nonce > other.write or not self._abort(other)
                ):
                    self._undo(write.nonce, write.changes)
                    self.settle(other.write)
                    raise Moved
            if self._has_moved(each) or (isinstance(each.record, Row) and is_occupied(each.key)):
                raise Moved
        hit("file.enqueue.before_publish")

    def _abort(self, new: WriteName) -> bool:
        """Prevent the commit of another write; False if it is too late."""
        if new.write in self._files.index.markers:
            return self._disk.remove(_marker(new.write))
        return self._disk.remove(path_of(new))

    def _take(self, write: Write, each: Change) -> None:
        assert each.source is not None
        taken = WriteName(write.nonce, "old" if write.has_marker else "done", each.source)
        text = str(taken)
        self._files.index.expect(text, taken)
        if not self._disk.move(path_of(each.source), f"tasks/{text}"):
            self._undo(write.nonce, write.changes)
            self._raise_moved(each.key)
        each.held_at = f"tasks/{text}"
        write.is_committed = not write.has_marker
        hit("file.record.after_take")

    def claim(self, each: Change) -> bool:
        """Rename a task whose record stays the same; False if others have renamed it."""
        assert each.source is not None
        assert each.target is not None
        self._unsynced.add("tasks")
        each.held_at = self._rename(path_of(each.source), each.target)
        return each.held_at != ""

    def unclaim(self, each: Change) -> bool:
        """Undo a claim, unless the task was renamed meanwhile."""
        source, target = each.source, each.target
        assert isinstance(source, RowName)
        assert isinstance(target, RowName)
        self._unsynced.add("tasks")
        return self._disk.move(each.held_at, path_of(replace(source, version=target.version + 1)))

    def _rename(self, path: str, target: RowName | DocumentName) -> str:
        """Give a name that the index does not read again; returns its path, or "" if it was too late."""
        text = str(target)
        self._files.index.expect(text, target)
        return f"tasks/{text}" if self._disk.move(path, f"tasks/{text}") else ""

    def _decide(self, write: Write) -> None:
        if write.is_committed:
            return
        if write.has_marker:
            done = _marker(write.nonce, "done")
            write.is_committed = self._disk.move(_marker(write.nonce), done)
        else:
            write.is_committed = self._publish(write.changes[0])
        if not write.is_committed:
            # Another process took this one for dead, or needed the same key.
            raise Moved

    def _undo(self, write: str, changes: Iterable[Change]) -> None:
        """Undo a write that is not committed. What cannot be undone now is undone by another process."""
        self._disk.remove_quietly(_marker(write))
        for each in changes:
            if each.held_at:
                self._give_back(each)
            for path, _ in each.moves:
                self._disk.remove_quietly(path)

    def _give_back(self, each: Change) -> None:
        source = each.source
        assert source is not None
        current = self._files.index.current(each.key)
        if each.is_claim:
            with suppress(OSError):
                self.unclaim(each)
        elif current is not None and current.content != source.content:
            # A power cut has reordered renames: the write was committed.
            self._disk.remove_quietly(each.held_at)
        else:
            self._disk.move_quietly(each.held_at, path_of(source))
        each.held_at = ""

    # After the commit

    def _apply(self, changes: Iterable[Change]) -> None:
        """Give the new records their names, and remove the old ones. Of several processes, one succeeds."""
        for each in changes:
            if each.is_claim:
                continue
            if each.source is None:
                self._publish(each)
                hit("file.enqueue.after_publish")
            elif each.record is not None:
                self._place(each)
            elif each.target is not None:
                self._rename(each.held_at, each.target)
                each.held_at = ""
                hit("file.record.after_rename")
            if each.held_at:
                self._remove_taken(each)

    def _publish(self, each: Change) -> bool:
        self._expect(each)
        return self._disk.move(*each.moves[0])

    def _place(self, each: Change) -> None:
        """Move the new record of a change from its parts."""
        for part, path in each.moves:
            if each.target is None:
                hit("file.record.before_result")
                self._disk.move(part, path)
                hit("file.record.after_result")
                self._unsynced.add(path.partition("/")[0])
            else:
                hit("file.requeue.before_task")
                self._expect(each)
                self._disk.move(part, path)
                hit("file.requeue.after_task")

    def _expect(self, each: Change) -> None:
        """Let the index know what the name of a new record says, if this process has written it."""
        name, record, text = each.target, each.record, each.moves[0][1][len("tasks/") :]
        if isinstance(name, RowName) and isinstance(record, Row):
            self._files.index.expect(text, name, WaitingRow.of(record, name.content))
        elif isinstance(name, DocumentName) and isinstance(record, Document):
            self._files.index.expect(text, name)
            self._files.know_document(name, record)

    def _remove_taken(self, each: Change) -> None:
        if each.held_at.endswith(".done"):
            # The commit itself: until the new names are durable, it may have to be finished again.
            self._leftovers[each.held_at] = each.key if each.is_erased else None
        else:
            self._remove(each.held_at, each.key if each.is_erased else None)

    def _remove(self, path: str, erased: str | None) -> None:
        if erased is None:
            self._disk.remove_quietly(path)
        else:
            self._disk.erase(path, erased)

    def flush(self) -> None:
        """Sync the changed folders, then remove what says that writes are committed."""
        if self._unsynced:
            self._disk.sync(*sorted(self._unsynced))
            self._unsynced.clear()
        if self._leftovers:
            hit("file.record.before_clear")
            for path, erased in self._leftovers.items():
                self._remove(path, erased)
            self._leftovers.clear()

    # Writes of others

    def settle(self, write: str) -> None:
        """Wait until a write of another process has ended, or end it."""
        looks = known = 0
        while looks < _PATIENCE:
            self._files.refresh()
            left = self._files.index.writes.get(write)
            if left is None:
                return
            if self._is_certainly_dead(write):
                break
            # One that takes thousands of names is not dead. If it was undone, it would begin again, for ever.
            looks, known = (looks + 1 if len(left) == known else 0), len(left)
            self._pause.wait(0.0005)
        self._end(write)
        self._files.refresh()

    def settle_key(self, key: str) -> None:
        """Settle the write that has taken the name with that key, or has committed a new one."""
        index = self._files.index
        if index.current(key) is not None:
            return
        if key in index.taken:
            self.settle(index.taken[key].write)
        for new in list(index.new.get(key, {}).values()):
            if index.markers.get(new.write) == "done":
                self.settle(new.write)

    def recover(self) -> None:
        """End the writes of processes that died."""
        index = self._files.index
        for write in [*index.writes, *index.markers.keys() - index.writes.keys()]:
            if self._is_certainly_dead(write) or self._is_abandoned(write):
                self._end(write)
        self.flush()

    def _is_certainly_dead(self, write: str) -> bool:
        """Whether the write is of an earlier boot, or of this thread, which is not writing now."""
        return not write.startswith(self._boot) or write.startswith(self._disk.own_prefix)

    def _is_abandoned(self, write: str) -> bool:
        index = self._files.index
        of_write, marker = [*index.writes.get(write, {}).values()], index.markers.get(write)
        has_taken = any(each.ending != "new" for each in of_write)
        if marker == "done" or (marker is None and has_taken):
            return True
        # Its files are written one after the other, so that the last one is the newest.
        path = path_of(of_write[-1]) if of_write and not has_taken else _marker(write)
        age = _ABANDONED_AFTER if has_taken else _SLOWEST_SYNC
        return self._disk.is_older(path, age, self._disk.disk_time())

    def _end(self, write: str) -> None:
        """Finish a write that is committed, undo another."""
        index = self._files.index
        is_committed = any(each.ending == "done" for each in index.writes.get(write, {}).values())
        if not is_committed:
            self._disk.remove(_marker(write))
            # If it is gone without a trace, it has ended meanwhile, and none of its names is left.
            is_committed = self._disk.exists(_marker(write, "done"))
        # Read after that: a slow process may have taken more names, and committed the write, meanwhile.
        self._files.refresh()
        left = [*self._files.index.writes.get(write, {}).values()]
        self._unsynced.add("tasks")
        if is_committed:
            self._finish(write, left)
            self.flush()
            self._disk.remove_quietly(_marker(write, "done"))
        else:
            self._undo(write, map(_change_of, left))

    def _finish(self, write: str, left: Iterable[WriteName]) -> None:
        renames = self._renames(write)
        for name in left:
            hit("file.recover.before_part")
            each = _change_of(name)
            if each.source is not None and renames is not None and str(each.source) in renames:
                self._disk.move(each.held_at, f"tasks/{renames[str(each.source)]}")
            elif each.source is None or self._read_part(
                each, write, is_readable=renames is not None
            ):
                self._apply([each])
            hit("file.recover.after_part")

    def _renames(self, write: str) -> dict[str, str] | None:
        """The names that the write only renames; None if they cannot be read."""
        with suppress(NotARecord, NewerRecord):
            data = self._disk.read(_marker(write, "done"))
            file = None if data is None else open_shared(data)
            if data is None or file is not None:
                return {} if file is None else file.renames
        return None

    def _read_part(self, each: Change, write: str, *, is_readable: bool) -> bool:
        """Read the new record of a change; False if the change cannot be finished."""
        paths = [path for path, _ in each.moves]
        try:
            data = self._disk.read(paths[0])
            if data is None:
                data = self._disk.read(paths[1])
            if data is not None:
                each.record = decode(unpack_one(data, each.key))
                each.place_in(content_of(data, write), write)
            elif not is_readable and not each.held_at.endswith(".done"):
                # Only after a power cut, in a store that is not durable. Better run it twice than lose it.
                self._give_back(each)
                return False
        except NotARecord as error:
            for damaged in paths:
                self._disk.quarantine(damaged, str(error))
            self._disk.quarantine(each.held_at, f"the new record cannot be read: {error}")
            return False
        each.is_erased = self._files.is_erased(each.held_at, each.source)
        return True


def _marker(write: str, ending: str = "open") -> str:
    """The path of the name whose rename from `.open` to `.done` commits a write."""
    return f"tasks/{write}.{ending}"


def _change_of(name: WriteName) -> Change:
    """The change of which a write has left the name."""
    inner = name.inner
    assert inner is not None
    if name.ending == "new" and not isinstance(inner, DeadName):
        return Change(inner.key, target=inner, moves=[(path_of(name), path_of(inner))])
    parts = [names.part_path(inner.key, name.write, ending) for ending in ("part", "dead")]
    return Change(inner.key, inner, moves=[(part, "") for part in parts], held_at=path_of(name))


def boot_mark(clock: Clock) -> str:
    """What the nonces of this boot of the machine begin with."""
    return hashlib.sha256(clock.boot_id().encode()).hexdigest()[:4]
