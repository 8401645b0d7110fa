"""Upgrade: moves what versions of omniq before format 2 have stored to the folders of today.

Those versions kept live tasks in the folder `queue`. It is moved aside, and an empty file takes its
name, so that their enqueues and claims fail with a `StorageError`. They may move that file away, and
create the folder again at their next start; so `unique`, which they look at when they start and never
list, becomes a link to itself: they cannot start. Then everything is moved piece by
piece: first what belongs to a task, then the task. Each piece is removed from its old place after it
is in its new one, so an upgrade that was interrupted, at any point, continues at the next opening.
Records of tasks have the same format, and only get new names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from omniq.clock import to_micros
from omniq.gate_rules import GateState
from omniq.models import Progress, Schedule
from omniq.serialization import encode_internal
from omniq.storage.backend import Changes, DocumentChange, Moved, complete
from omniq.storage.file import encoding
from omniq.storage.file import file_names as names
from omniq.storage.file.encoding import Codec, EndedTask, Kind, NewerRecord, NotARecord
from omniq.storage.file.file_names import RowName, document_key, id_of
from omniq.storage.file.shared_file import unpack_one
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.pauses import PAUSED_QUEUE
from omniq.storage.row_rules import Row
from omniq.storage.schedule_engine import SCHEDULE
from omniq.storage.step import CHECKPOINT, NEWEST, PROGRESS, UNIQUE

if TYPE_CHECKING:
    from omniq.storage.file.store import Store

T = TypeVar("T")

_BATCH = 200
_CLAIM = re.compile(r"(.+)\.(\d{1,19})\.([A-Za-z0-9_-]{1,64})\.(\d{1,19})\.(running|cancelling)")
_DONE = re.compile(r"(.+)\.(\d{1,19}\.[A-Za-z0-9_-]{1,64})\.done")
_LEASE = re.compile(r"([A-Za-z0-9_-]{1,64}\.[0-9a-f]{12}\.\d{1,16})\.lease")


class _OldLive(msgspec.Struct):
    row: Row
    newest: bytes | None = None
    clears_notes: bool = False


class _OldSchedule(msgspec.Struct):
    schedule: Schedule
    body: bytes


class _OldCheckpoint(msgspec.Struct):
    saved_at: int
    data: bytes


_LIVE = Codec(Kind.LIVE, _OldLive)
_GATE: Codec[tuple[str, GateState]] = Codec(Kind.GATE, tuple[str, GateState])
_SCHEDULE = Codec(Kind.SCHEDULE, _OldSchedule)
_CHECKPOINT = Codec(Kind.CHECKPOINT, _OldCheckpoint)
_PROGRESS = Codec(Kind.PROGRESS, Progress)


class _Moving(NamedTuple):
    """A live task in an old place: its path, its new name, and its record."""

    path: str
    name: RowName
    live: _OldLive


def drain_old_layout(store: Store, *, is_opening: bool = False) -> None:
    """Move what is in the old places, and close them."""
    disk = store.disk
    is_old = disk.is_folder("queue")
    if is_old:
        if disk.is_folder("unique"):
            disk.move("unique", f"unique-{disk.nonce()}")
        disk.link_to_itself("unique")
        disk.move("queue", f"queue-{disk.nonce()}")
    if is_old or not disk.exists("queue"):
        with suppress(FileExistsError):
            disk.write("queue", b"")
    elif not is_opening:
        return
    left = [name for name in disk.names("") if name.startswith("queue-")]
    if left:
        _Upgrade(store).run(left)


class _Upgrade:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._disk = store.disk
        self._contents: dict[int, str] = {}

    def run(self, folders: list[str]) -> None:
        """Move everything; other processes may do the same at the same time."""
        self._move_leases()
        for folder in folders:
            for name in self._disk.names(folder):
                done = _DONE.fullmatch(name)
                if done is not None:
                    self._finish_change(f"{folder}/{name}", done[1], done[2])
        self._put(self._gates())
        self._put(self._schedules())
        self._put(self._paused())
        self._put(self._notes())
        self._move_rows(self._intents())
        for folder in folders:
            self._move_rows(self._rows(folder))
        self._disk.sync("tasks", "results", "dead", "leases")
        unique = [name for name in self._disk.names("") if name.startswith("unique-")]
        for folder in ("workers", *unique):
            self._remove(folder)
        for folder in ("gates", "schedules", "paused", "notes", *folders):
            self._disk.remove_folder(folder)
        self._disk.sync("")

    # Tasks

    def _rows(self, folder: str) -> Iterator[_Moving]:
        for name, inode in sorted(self._disk.scan(folder), key=lambda entry: entry[1]):
            path = f"{folder}/{name}"
            claim = _CLAIM.fullmatch(name)
            task_id = id_of(name, ".task")
            if claim is not None:
                marks = "c" if claim[5] == "cancelling" else ""
                held = (int(claim[2]), claim[3], int(claim[4]))
                yield from self._moving(path, inode, RowName(claim[1], "", 0, marks, None, *held))
            elif task_id is not None:
                yield from self._moving(path, inode, RowName(task_id, ""))
            else:
                self._disk.quarantine(path, "not the name of a task")

    def _intents(self) -> Iterator[_Moving]:
        """Tasks that a process was about to enqueue when it died."""
        for name, inode in self._disk.scan("tmp"):
            task_id = id_of(name, ".task.tmp")
            if task_id is None:
                continue
            if self._store.finished.has_record(task_id):
                self._disk.remove_quietly(f"tmp/{name}")
            else:
                yield from self._moving(f"tmp/{name}", inode, RowName(task_id, ""))

    def _moving(self, path: str, inode: int, name: RowName) -> Iterator[_Moving]:
        """The task in that place, with a name that has its content and its marks; none if it is gone."""
        live = self._read(path, name.key, _LIVE.decode)
        if live is not None:
            index = self._store.files.index
            kinds = (CHECKPOINT, PROGRESS)
            has_notes = any(index.document(document_key(kind, name.key)) for kind in kinds)
            marks = ("a" if has_notes or live.newest is not None else "") + name.marks
            content = self._contents.setdefault(inode, self._disk.nonce())
            yield _Moving(path, replace(name, content=content, marks=marks), live)

    def _move_rows(self, rows: Iterator[_Moving]) -> None:
        """Write the documents of some rows, then give the rows their new names."""
        while batch := list(islice(rows, _BATCH)):
            self._move_batch(batch)

    def _move_batch(self, batch: list[_Moving]) -> None:
        documents: list[DocumentChange] = []
        for _, name, live in batch:
            unique = live.row.unique
            if unique is not None:
                documents.append(_document(UNIQUE, unique, name.key.encode()))
            if live.newest is not None:
                documents.append(_document(NEWEST, name.key, live.newest))
        self._write(documents)
        self._store.files.refresh()
        for path, name, _ in batch:
            if self._store.files.index.is_live(name.key):
                self._disk.quarantine(path, "another task has this id")
            else:
                self._disk.move(path, names.path_of(name))

    def _finish_change(self, path: str, task_id: str, change: str) -> None:
        """Finish a change that was committed when its process died."""
        part, dead_part = f"results/{task_id}.{change}.part", f"dead/{task_id}.{change}.part"
        found = self._read(part, task_id, _decode_part)
        if isinstance(found, _OldLive):
            if found.clears_notes:
                for name in self._disk.names(f"notes/{task_id}"):
                    self._remove(f"notes/{task_id}/{name}")
            moved = replace(names.name_of(found.row, ""), parked=None)
            facts = self._disk.stat(part)
            self._move_rows(self._moving(part, 0 if facts is None else facts.st_ino, moved))
        elif found is not None:
            if found.row.result_ttl:
                self._disk.move(part, names.result_path(task_id))
            else:
                self._disk.remove(part)
        self._disk.move(dead_part, names.dead_path(task_id))
        self._disk.sync("tasks", "results", "dead")
        self._disk.remove_quietly(path)

    # Documents

    def _put(self, documents: Iterator[tuple[str, DocumentChange | None]]) -> None:
        """Write documents, then remove the files from which they were read."""
        while batch := list(islice(documents, _BATCH)):
            self._write([change for _, change in batch if change is not None])
            for path, _ in batch:
                self._remove(path)

    def _write(self, documents: list[DocumentChange]) -> None:
        while documents:
            try:
                complete(self._store.section().write(Changes(documents=documents)))
                break
            except Moved:
                continue
        self._store.writes.flush()

    def _gates(self) -> Iterator[tuple[str, DocumentChange | None]]:
        for folder, name in self._values("gates"):
            found = self._read(f"{folder}/{name}", "", _GATE.decode)
            if found is not None:
                key, state = found
                yield folder, _document(GATE, key, encode_internal(state))

    def _schedules(self) -> Iterator[tuple[str, DocumentChange | None]]:
        for folder, name in self._values("schedules"):
            found = self._read(f"{folder}/{name}", "", _SCHEDULE.decode)
            if found is not None:
                schedule = found.schedule
                due = None if schedule.next_at is None else to_micros(schedule.next_at)
                data = encode_internal((schedule.version, schedule, found.body))
                yield folder, _document(SCHEDULE, schedule.id, data, due)

    def _values(self, kind: str) -> Iterator[tuple[str, str]]:
        """The folder of each value, and the name of its newest version."""
        for entry in self._disk.names(kind):
            folder = f"{kind}/{entry}"
            if not self._disk.is_folder(folder):
                continue
            for name in self._disk.names(folder):
                number, _, rest = name.partition(".")
                # A change that was committed: its new version has not got its name yet.
                if rest.endswith(".over") and number.isdigit():
                    part = f"{int(number) + 1}.{rest.removesuffix('.over')}.part"
                    self._disk.move(f"{folder}/{part}", f"{folder}/{int(number) + 1}")
            numbers = [int(name) for name in self._disk.names(folder) if name.isdigit()]
            if numbers:
                yield folder, str(max(numbers))

    def _paused(self) -> Iterator[tuple[str, DocumentChange | None]]:
        for name in self._disk.names("paused"):
            queue = name.removesuffix(".paused")
            if queue != name:
                yield f"paused/{name}", _document(PAUSED_QUEUE, queue, b"")

    def _notes(self) -> Iterator[tuple[str, DocumentChange | None]]:
        for task_id in self._disk.names("notes"):
            folder = f"notes/{task_id}"
            if not self._disk.is_folder(folder):
                continue
            tokens = [name.removesuffix(".checkpoint") for name in self._disk.names(folder)]
            newest = max((int(token) for token in tokens if token.isdigit()), default=None)
            if newest is not None:
                found = self._read(f"{folder}/{newest}.checkpoint", "", _CHECKPOINT.decode)
                if found is not None:
                    data = encode_internal((found.saved_at, found.data))
                    yield "", _document(CHECKPOINT, task_id, data, found.saved_at)
            progress = self._read(f"{folder}/progress", "", _PROGRESS.decode)
            change = None
            if progress is not None:
                change = _document(PROGRESS, task_id, encode_internal(progress))
            yield folder, change

    # Files

    def _move_leases(self) -> None:
        for name in self._disk.names("workers"):
            lease = _LEASE.fullmatch(name)
            if lease is not None:
                # An owner that renews under the old name is fenced. Its tasks are given back in time.
                self._disk.move(f"workers/{name}", f"leases/{lease[1]}.0.0.0.lease")
            elif name.endswith(".info"):
                self._disk.move(f"workers/{name}", f"leases/{name}")

    def _read(self, path: str, key: str, decode: Callable[[bytes], T]) -> T | None:
        try:
            data = self._disk.read(path)
            return None if data is None else decode(unpack_one(data, key))
        except (NotARecord, NewerRecord) as error:
            self._disk.quarantine(path, str(error))
            return None

    def _remove(self, path: str) -> None:
        """Remove a file, or a folder with its files."""
        if path and self._disk.is_folder(path):
            for name in self._disk.names(path):
                self._disk.remove_quietly(f"{path}/{name}")
            self._disk.remove_folder(path)
        elif path:
            self._disk.remove_quietly(path)


def _decode_part(data: bytes) -> _OldLive | EndedTask:
    """Decode the new record of a change."""
    return (
        _LIVE.decode(data)
        if encoding.unframe(data)[0] == Kind.LIVE
        else encoding.ENDED.decode(data)
    )


def _document(kind: str, key: str, data: bytes, due: int | None = None) -> DocumentChange:
    # What is there already was written by an upgrade that did not end, or later.
    return DocumentChange(kind, key, None, data, due, if_equal=True)
