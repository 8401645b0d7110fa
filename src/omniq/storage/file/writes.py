"""Writes: change many names in one step, of which others see all or nothing, with renames alone.

A write of the nonce W changes names of tasks and documents in these steps:

    1 write the new records as parts/<key>.W.part (and sync them), and link tasks/W.open
    2 link new names as <name>.new, and check that nothing else has their keys
    3 rename every old name to <name>.W.old; if one is gone, others have changed it: undo
    4 rename the tasks that are claimed to their new names; if one is gone: undo
    5 rename W.open to W.done: this commits
    6 rename the parts and the .new names to their final names, remove the .old names
    7 sync the folders, then remove W.done

A process that needs a name that a write has taken waits for a moment. If the name is still taken then,
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

import msgspec

from omniq.clock import Clock
from omniq.failpoints import hit
from omniq.storage.backend import Document, Moved
from omniq.storage.file.encoding import (
    EndedTask,
    Live,
    NewerRecord,
    NotARecord,
    WaitingRow,
    decode_part,
)
from omniq.storage.file.file_names import (
    DeadName,
    DocumentName,
    Marker,
    Name,
    NewName,
    RowName,
    TakenName,
    document_key,
    part_path,
    result_path,
    write_of,
)
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.row_names import first_name
from omniq.storage.file.shared_file import content_of, pack, renames_in, unpack_one
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.row_rules import Row

_PATIENCE = 100
"""How often a process looks, in pauses of half a millisecond, whether a write of another has ended."""

_ABANDONED_AFTER = 2 * 10**9
"""Nanoseconds after which a write that is not committed counts as one of a process that died."""

_STEPS_SHOWN = 500
"""Steps after which a write shows that its process has not died."""


class Prepared(msgspec.Struct):
    """A new record. An ended task has no name in `tasks`; its folders follow from the record."""

    key: str
    data: bytes
    record: Row | Document | None = None
    source: Name | None = None
    has_result: bool = False
    is_dead: bool = False
    name: RowName | DocumentName | None = None
    text: str = ""

    @property
    def parts(self) -> list[str]:
        """The endings of its parts."""
        if self.record is not None or self.has_result:
            return ["part", "dead"] if self.is_dead else ["part"]
        return ["dead"]


class Write(msgspec.Struct):
    """What one write changes. `erased`: keys of tasks whose old records are overwritten.

    What it has done is in `contents` (the files of new records), `taken` (by key, with their paths) and
    `has_claimed`. `has_marker`: several names change, so that another rename must commit them together.
    """

    nonce: str
    inserted: list[Prepared] = []
    changed: list[Prepared] = []
    renamed: list[tuple[RowName, RowName]] = []
    claimed: list[tuple[RowName, RowName]] = []
    removed: list[Name] = []
    erased: set[str] = set()
    contents: list[str] = []
    taken: dict[str, tuple[TakenName, str]] = {}
    has_claimed: list[tuple[RowName, RowName]] = []
    has_marker: bool = False
    is_committed: bool = False

    @property
    def sources(self) -> list[Name]:
        """The names that the write takes, in an order in which two writes do not block each other."""
        names: list[Name] = [each.source for each in self.changed if each.source is not None]
        names += [source for source, _ in self.renamed]
        return sorted((*names, *self.removed), key=lambda name: name.key)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return self.size == 0

    @property
    def size(self) -> int:
        """The number of names that change together."""
        taken = len(self.changed) + len(self.renamed) + len(self.removed)
        return taken + len(self.inserted) + len(self.claimed)


class Writes:
    """Commits the writes of this process, and finishes or undoes those of others."""

    def __init__(self, files: TaskFiles, clock: Clock) -> None:
        self._files = files
        self._disk: Disk = files.disk
        self._clock = clock
        self._boot = boot_mark(clock)
        self._unsynced: set[str] = set()
        self._leftovers: dict[str, str | None] = {}
        self._pause = threading.Event()

    def new(self) -> Write:
        """A write that changes nothing yet."""
        return Write(self._disk.nonce())

    # Writing

    def commit(self, write: Write, is_occupied: Callable[[str], bool]) -> None:
        """Make all the changes, or raise `Moved` if others have changed a name meanwhile.

        `is_occupied`: whether a task that has ended still has the id of a new one.
        """
        self._check(write)
        self._unsynced.add("tasks")
        renamed, size = [*write.renamed, *write.claimed], write.size
        write.has_marker = size > 1
        if len(renamed) == size == 1:
            source, target = renamed[0]
            if not self._rename(source.path, target):
                self._raise_moved([source])
            return
        try:
            self._prepare(write)
            self._announce(write, is_occupied)
            self._take(write)
            self._claim(write)
            self._decide(write)
        except BaseException:
            if not write.is_committed:
                self._undo(write)
            raise
        try:
            if write.taken:
                hit("file.record.after_commit")
            self._apply(write)
        except BaseException:
            # Committed, and not finished. The index does not have this write's own new names. With them,
            # a repeat meets this write and finishes it, instead of adding its tasks again.
            self._files.distrust_index()
            raise

    def _check(self, write: Write) -> None:
        """Raise `Moved` before anything is written, if the index knows that a name has changed."""
        sources = (*write.sources, *(source for source, _ in write.claimed))
        if sources:
            self._files.refresh()
        index = self._files.index
        for source in sources:
            if isinstance(source, RowName):
                current: Name | None = index.rows.get(source.key)
            elif isinstance(source, DocumentName):
                current = index.document(source.key)
            else:
                continue
            if current != source:
                self._raise_moved([source])
        for each in write.inserted:
            if self._has_name(each):
                self._raise_moved([], each.key)

    def _has_name(self, each: Prepared) -> bool:
        """Whether there is a name with the key of a new record."""
        index, key = self._files.index, each.key
        if key in index.taken:
            return True
        if isinstance(each.record, Row):
            return key in index.rows
        return index.document(key) is not None

    def _raise_moved(self, sources: Iterable[Name], key: str = "") -> None:
        """Wait until what has moved is settled, so that the next try can succeed."""
        self._files.refresh()
        for each in (*(source.key for source in sources), key):
            self.settle_key(each)
        raise Moved

    def _prepare(self, write: Write) -> None:
        records = [*write.changed, *write.inserted]
        by_key = {each.key: each for each in records}
        renames = {str(source): str(target) for source, target in write.renamed}
        has_marker = write.has_marker
        if not (records or has_marker):
            return
        packed = pack(
            write.nonce,
            ((each.key, each.data) for each in records),
            renames if has_marker else None,
        )
        files: list[tuple[list[str], bytes]] = []
        for content, keys, data in packed:
            # The parts of a single changed task are names enough.
            names = [] if write.changed and not has_marker else [f"parts/{content}.data"]
            for key in keys:
                each = by_key[key]
                if isinstance(each.record, Row):
                    each.name = first_name(each.record, content)
                elif each.record is not None:
                    each.name = DocumentName(key, content, each.record.due)
                each.text = str(each.name)
                if each.source is not None:
                    names += [part_path(key, write.nonce, ending) for ending in each.parts]
            files.append((names, data))
            if has_marker:
                write.contents.append(content)
        self._disk.write_all(files)
        if write.changed:
            hit("file.record.after_part")
        if has_marker:
            self._disk.link(f"parts/{write.nonce}.data", Marker(write.nonce).path)

    def _announce(self, write: Write, is_occupied: Callable[[str], bool]) -> None:
        """Link the new names, then check that nothing else has their keys."""
        if not write.inserted:
            return
        hit("file.enqueue.before_link")
        # A file with one name is moved; a shared one is linked, once for each name.
        announce = self._disk.link if write.has_marker else self._disk.move
        for number, each in enumerate(write.inserted):
            assert each.name is not None
            self._show_progress(write, number)
            announce(f"parts/{each.name.content}.data", f"tasks/{each.text}.new")
        hit("file.enqueue.after_link")
        # A later announcement sees this one, so one of two notices the other.
        self._files.refresh()
        announced = self._files.index.new
        for number, each in enumerate(write.inserted):
            self._show_progress(write, number)
            others = announced.get(each.key)
            for other in list(others.values()) if others else ():
                if other.write == write.nonce:
                    continue
                if write.nonce > other.write or not self._abort(other):
                    self._undo(write)
                    self.settle(other.write)
                    raise Moved
            if self._has_name(each) or (isinstance(each.record, Row) and is_occupied(each.key)):
                raise Moved
        hit("file.enqueue.before_publish")

    def _show_progress(self, write: Write, number: int) -> None:
        """Show others that this process is alive, which may take long for a large batch."""
        if number % _STEPS_SHOWN == 0 and len(write.inserted) > _STEPS_SHOWN:
            self._disk.touch(Marker(write.nonce).path)

    def _abort(self, new: NewName) -> bool:
        """Prevent the commit of another write; False if it is too late."""
        marker = Marker(new.write)
        if self._files.index.markers.get(new.write) is not None:
            return self._disk.remove(marker.path)
        return self._disk.remove(f"tasks/{new}")

    def _take(self, write: Write) -> None:
        is_done = not write.has_marker
        for source in write.sources:
            taken = TakenName(source, write.nonce, is_done)
            text = str(taken)
            self._files.index.expect(text, taken)
            if not self._disk.move(source.path, f"tasks/{text}"):
                self._undo(write)
                self._raise_moved([source])
            write.taken[taken.key] = taken, f"tasks/{text}"
            write.is_committed = is_done
            hit("file.record.after_take")

    def _claim(self, write: Write) -> None:
        for source, target in write.claimed:
            if not self._rename(source.path, target):
                self._undo(write)
                self._raise_moved([source])
            write.has_claimed.append((source, target))
            hit("file.claim.after_rename")

    def _rename(self, path: str, target: RowName) -> bool:
        text = str(target)
        self._files.index.expect(text, target)
        return self._disk.move(path, f"tasks/{text}")

    def _decide(self, write: Write) -> None:
        if write.is_committed:
            return
        if write.has_marker:
            marker = Marker(write.nonce)
            write.is_committed = self._disk.move(marker.path, Marker(write.nonce, True).path)
        else:
            (each,) = write.inserted
            write.is_committed = self._publish(each)
        if not write.is_committed:
            # Another process took this one for dead, or needed the same key.
            raise Moved

    def _publish(self, each: Prepared) -> bool:
        self._expect(each)
        return self._disk.move(f"tasks/{each.text}.new", f"tasks/{each.text}")

    def _expect(self, each: Prepared) -> None:
        name, record = each.name, each.record
        if isinstance(name, RowName) and isinstance(record, Row):
            self._files.index.expect(each.text, name, WaitingRow.of(record, name.content))
        elif isinstance(name, DocumentName) and isinstance(record, Document):
            self._files.index.expect(each.text, name)
            self._files.know_document(name, record)

    def _undo(self, write: Write) -> None:
        """Undo a write that is not committed. What cannot be undone now is undone by another process."""
        if write.has_marker:
            self._disk.remove_quietly(Marker(write.nonce).path)
        for source, target in write.has_claimed:
            unclaimed = source._replace(version=target.version + 1)
            self._disk.move_quietly(target.path, unclaimed.path)
        write.has_claimed.clear()
        for taken, path in write.taken.values():
            self._disk.move_quietly(path, taken.inner.path)
        write.taken.clear()
        for each in write.inserted:
            if each.name is not None:
                self._disk.remove_quietly(f"tasks/{each.text}.new")
        for each in write.changed:
            for ending in each.parts:
                self._disk.remove_quietly(part_path(each.key, write.nonce, ending))
        for content in write.contents or [write.nonce]:
            self._disk.remove_quietly(f"parts/{content}.data")

    # After the commit

    def _apply(self, write: Write) -> None:
        """Give the new records their names, and remove the old ones."""
        taken = dict(write.taken)
        for each in write.changed:
            self._place(each, write.nonce)
            self._remove_taken(write, *taken.pop(each.key))
        for source, target in write.renamed:
            self._rename(taken.pop(source.key)[1], target)
            hit("file.record.after_rename")
        for left in taken.values():
            self._remove_taken(write, *left)
        if write.has_marker:
            for each in write.inserted:
                self._publish(each)
                hit("file.enqueue.after_publish")
            self._leftovers[Marker(write.nonce, True).path] = None
        for content in write.contents:
            self._disk.remove_quietly(f"parts/{content}.data")

    def _remove_taken(self, write: Write, taken: TakenName, path: str) -> None:
        key = taken.inner.key if taken.inner.key in write.erased else None
        if taken.is_done:
            # The commit itself: until the new names are durable, it may have to be finished again.
            self._leftovers[path] = key
        else:
            self._remove(path, key)

    def _remove(self, path: str, erased: str | None) -> None:
        if erased is None:
            self._disk.remove_quietly(path)
        else:
            self._disk.erase(path, erased)

    def _place(self, each: Prepared, write: str) -> None:
        """Move the parts of a record to their final names. Of several processes, one succeeds."""
        if each.name is not None:
            self._expect(each)
            hit("file.requeue.before_task")
            self._disk.move(part_path(each.key, write), f"tasks/{each.text}")
            hit("file.requeue.after_task")
            return
        hit("file.record.before_result")
        if each.has_result:
            self._disk.move(part_path(each.key, write), result_path(each.key))
            self._unsynced.add("results")
        hit("file.record.after_result")
        if each.is_dead:
            self._disk.move(part_path(each.key, write, "dead"), DeadName(each.key).path)
            self._unsynced.add("dead")

    def mark_unsynced(self, folder: str) -> None:
        """Have `flush` sync this folder, in which a name has changed."""
        self._unsynced.add(folder)

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
        for _ in range(_PATIENCE):
            self._files.refresh()
            if write not in self._files.index.writes:
                return
            if self._is_certainly_dead(write):
                break
            self._pause.wait(0.0005)
        self._end(write)
        self._files.refresh()

    def settle_key(self, key: str) -> None:
        """Settle the write that has taken the name with that key, or has committed a new one."""
        index = self._files.index
        if key in index.rows or index.document(key) is not None:
            return
        taken = index.taken.get(key)
        writes = [] if taken is None else [taken.write]
        for new in index.new.get(key, {}).values():
            marker = index.markers.get(new.write)
            if marker is not None and marker.is_done:
                writes.append(new.write)
        for write in writes:
            self.settle(write)

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
        marker = self._files.index.markers.get(write)
        names = self._files.index.writes.get(write, {})
        if marker is None:
            news = [each for each in names.values() if isinstance(each, NewName)]
            if len(news) < len(names):
                return True
            path = f"tasks/{news[0]}"
        elif marker.is_done:
            return True
        else:
            path = marker.path
        try:
            return self._disk.disk_time() - self._disk.changed_at(path) > _ABANDONED_AFTER
        except FileNotFoundError:
            return False

    def _end(self, write: str) -> None:
        """Finish a write that is committed, undo another."""
        names = list(self._files.index.writes.get(write, {}).values())
        marker = Marker(write, is_done=True)
        is_committed = any(isinstance(each, TakenName) and each.is_done for each in names)
        if not is_committed:
            self._disk.remove(Marker(write).path)
            # If it is gone without a trace, it has ended meanwhile, and none of its names is left.
            is_committed = self._disk.exists(marker.path)
        self._unsynced.add("tasks")
        if is_committed:
            self._finish(write, names, marker)
            self.flush()
            self._disk.remove_quietly(marker.path)
        else:
            for each in names:
                self._roll_back(each)
        self._disk.remove_quietly(f"parts/{write}.data")

    def _roll_back(self, each: TakenName | NewName) -> None:
        if isinstance(each, NewName):
            self._disk.remove_quietly(f"tasks/{each}")
            return
        current = self._files.index.rows.get(each.key)
        if current is not None and current.content != getattr(each.inner, "content", ""):
            # A power cut has reordered renames: the write was committed.
            self._disk.remove_quietly(each.path)
        else:
            self._disk.move_quietly(each.path, each.inner.path)
        for ending in ("part", "dead"):
            self._disk.remove_quietly(part_path(each.key, write_of(each.write), ending))

    def _finish(self, write: str, names: list[TakenName | NewName], marker: Marker) -> None:
        renames = self._renames(marker)
        for each in names:
            hit("file.recover.before_part")
            if isinstance(each, NewName):
                self._disk.move(f"tasks/{each}", each.inner.path)
                continue
            target = None if renames is None else renames.get(str(each.inner))
            if target is not None:
                self._disk.move(each.path, f"tasks/{target}")
            else:
                self._finish_part(each, write, is_readable=renames is not None)
            hit("file.recover.after_part")

    def _renames(self, marker: Marker) -> dict[str, str] | None:
        """The names that the write only renames; None if they cannot be read."""
        try:
            data = self._disk.read(marker.path)
            return {} if data is None else renames_in(data)
        except (NotARecord, NewerRecord):
            return None

    def _finish_part(self, taken: TakenName, write: str, *, is_readable: bool) -> None:
        path = part_path(taken.key, write)
        dead_path = part_path(taken.key, write, "dead")
        try:
            data = self._disk.read(path)
            if data is None:
                data = self._disk.read(dead_path)
            if data is not None:
                self._place(self._decoded(taken.key, write, data), write)
            elif not is_readable and not taken.is_done:
                # Only after a power cut, in a store that is not durable. Better run it twice than lose it.
                self._disk.move(taken.path, taken.inner.path)
                return
        except NotARecord as error:
            for damaged in (path, dead_path):
                self._disk.quarantine(damaged, str(error))
            self._disk.quarantine(taken.path, f"the new record cannot be read: {error}")
            return
        row = self._files.taken_row(taken)
        is_erased = row is not None and row.result_ttl == 0
        if taken.is_done:
            self._leftovers[taken.path] = taken.key if is_erased else None
        else:
            self._remove(taken.path, taken.key if is_erased else None)

    def _decoded(self, key: str, write: str, data: bytes) -> Prepared:
        content, record = content_of(data, write), decode_part(unpack_one(data, key))
        match record:
            case Live():
                name: RowName | DocumentName | None = first_name(record.row, content)
                return Prepared(key, data, record.row, name=name, text=str(name))
            case EndedTask():
                has_result, is_dead = record.row.result_ttl > 0, record.letter is not None
                return Prepared(key, data, has_result=has_result, is_dead=is_dead)
        if document_key(record.kind, record.key) != key:
            raise NotARecord(f"the document {record.kind} {record.key}")
        name = DocumentName(key, content, record.due)
        return Prepared(key, data, record, name=name, text=str(name))


def boot_mark(clock: Clock) -> str:
    """What the nonces of this boot of the machine begin with."""
    return hashlib.sha256(clock.boot_id().encode()).hexdigest()[:4]
