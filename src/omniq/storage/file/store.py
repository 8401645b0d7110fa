"""Store: carries out the calls of the backend, with blocking system calls, in one thread."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from omniq.clock import Clock, from_micros
from omniq.errors import LeaseLost, StorageError
from omniq.failpoints import hit
from omniq.models import WorkerInfo
from omniq.storage import backend
from omniq.storage.backend import Counts, Document, Record, Work, complete
from omniq.storage.file.encoding import DOCUMENT
from omniq.storage.file.file_names import DocumentName, RowName, document_key
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.finished import FinishedTasks
from omniq.storage.file.leases import Leases, OwnClaims
from omniq.storage.file.section import FileSection
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.upgrade import drain_old_layout
from omniq.storage.file.writes import Writes, boot_mark
from omniq.storage.incarnation import STORE, check_reader, decode_record, new_record
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.row_rules import Row
from omniq.storage.types import Holder, LeaseReply, Renewal

T = TypeVar("T")

_STORE = document_key(STORE, STORE)

_NONCE_LENGTH = 10
"""Random characters at the beginning of a store's nonces. Long names cost space."""


class SequenceNumbers:
    """Sequence numbers: in this process, later enqueues get larger numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def take(self, count: int, now: int) -> range:
        """Return the next numbers. Across processes the clock decides the order."""
        with self._lock:
            first = max(now, self._last + 1)
            self._last = first + count - 1
        return range(first, first + count)


_sequences: WeakValueDictionary[tuple[int, int], SequenceNumbers] = WeakValueDictionary()
_sequences_lock = threading.Lock()


def _sequence_numbers_of(root: Path) -> SequenceNumbers:
    """The sequence numbers of a folder, shared by all storages of this process, to order them."""
    facts = os.stat(root)
    with _sequences_lock:
        return _sequences.setdefault((facts.st_dev, facts.st_ino), SequenceNumbers())


class Store:
    """One folder. Call `open` first; after that every method leaves the store consistent."""

    def __init__(
        self, root: Path, clock: Clock, own_claims: OwnClaims, *, is_durable: bool
    ) -> None:
        self._clock = clock
        self._own_claims = own_claims
        self.disk = Disk(
            root,
            is_durable=is_durable,
            nonce_prefix=boot_mark(clock) + clock.new_id()[-_NONCE_LENGTH:],
        )
        self.files = TaskFiles(self.disk, clock)
        self.writes = Writes(self.files, clock)
        self.finished = FinishedTasks(self.files)
        self.leases = Leases(self.disk, clock)

    def open(self) -> None:
        """Create the missing folders, and move what an older version has stored to the new ones."""
        self.disk.open()
        try:
            self._sequence = _sequence_numbers_of(self.disk.root)
            self._make_tasks_folder()
            drain_old_layout(self, is_opening=True)
            self._find_record()
        except BaseException:
            self.close()
            raise

    def _make_tasks_folder(self) -> None:
        """Create `tasks` together with the document `store`, so that there is never one without it."""
        if self.disk.is_folder("tasks"):
            return
        draft = f"tmp/{self.disk.nonce()}.tasks"
        self.disk.make_folder(draft)
        record = Document(STORE, STORE, new_record(self._clock.new_id()), due=0)
        name = DocumentName(_STORE, self.disk.nonce(), due=0)
        self.disk.write(f"{draft}/{name}", DOCUMENT.encode(record))
        self.disk.sync(draft)
        if not self.disk.move_folder(draft, "tasks"):
            self.disk.remove(f"{draft}/{name}")
            self.disk.remove_folder(draft)
        self.disk.sync(".")

    def close(self) -> None:
        """Close; does nothing when called again."""
        self.files.close()
        self.disk.close()

    # Sections

    def section(self) -> FileSection:
        """A new section on what is stored now."""
        section = FileSection(
            self.files, self.writes, self.finished, self._own_claims, self._sequence.take
        )
        self._read_record()
        return section

    def _read_record(self) -> bytes | None:
        """Read the store's record, if it has changed; refuse one that needs a newer omniq."""
        name = self.files.index.document(_STORE)
        if name != self._own_claims.store[0]:
            found = None if name is None else self.files.read_document(name)
            data = None if found is None else found[1].data
            check_reader(decode_record(data))
            self._own_claims.store = name, data
        return self._own_claims.store[1]

    def _find_record(self) -> bytes | None:
        """Read the store's record, without the index if it has not changed: a heartbeat needs no index."""
        name, data = self._own_claims.store
        if name is not None and self.disk.exists(name.path):
            return data
        self.files.refresh()
        return self._read_record()

    @property
    def epoch(self) -> int:
        """The store's epoch, when its record was last read."""
        name, _ = self._own_claims.store
        return 0 if name is None else name.due or 0

    def transact(self, section: FileSection, work: Work[T], holder: Holder | None) -> T:
        """Run the work of the engine in the section."""
        claims_as = None if holder is None else holder.owner
        if holder is not None:
            if holder.epoch != self.epoch or not self._has_lease(holder.owner):
                raise LeaseLost(holder.owner)
            section.epoch = self.epoch
        try:
            result = complete(work(section))
            if section.claimed and claims_as is not None and not self._has_lease(claims_as):
                # Fenced between the two checks. Undone here, the claims cost the tasks no crash.
                section.undo_claims()
                raise LeaseLost(claims_as)
        finally:
            self.writes.flush()
        return result

    def undo_claims(self, section: FileSection) -> None:
        """Undo the claims of a section whose caller was cancelled."""
        self.files.refresh()
        section.undo_claims()
        self.writes.flush()

    def find(self, task_id: str) -> Record | None:
        """What is stored under an id; None for records of a newer format, which are left alone."""
        try:
            return self._reader.find(task_id)
        except StorageError:
            return None

    # Counts and pages

    def counts(self, *, only_waiting: bool) -> Counts:
        """Count the tasks."""
        self._reader = self.section()
        now = self._reader.now
        if only_waiting:
            return Counts(now=now, waiting=self.finished.count_waiting(self.find))
        return self.finished.counts(now, self.find)

    def page(self, query: object) -> object:
        """Return one page."""
        self._reader = self.section()
        now, finished = self._reader.now, self.finished
        match query:
            case TaskQuery():
                return finished.list_rows(query, now, self.find)
            case ScanQuery():
                return self._scan(query, now)
            case DeadQuery():
                return finished.list_dead(query)
            case backend.FinishedQuery():
                return finished.list_ids(query)
        raise TypeError(f"no such query: {query!r}")

    def _scan(self, query: ScanQuery, now: int) -> Scan:
        async def read_backwards(before: str, limit: int) -> tuple[list[Row], str | None]:
            return self.finished.read_backwards(query, before, limit, now, self.find)

        async def read_page(page: TaskQuery) -> list[Row]:
            return self.finished.list_rows(page, now, self.find)

        return complete(scan_by_id(query, read_backwards, read_page))

    # Leases and recovery

    def _has_lease(self, owner: str) -> bool:
        own = self._own_claims
        if own.owner == owner and self.disk.exists(own.lease_path):
            return True
        lease = self.leases.of(owner)
        if lease is not None:
            own.start(owner, lease.path)
        return lease is not None

    def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        """Renew the lease; returns the tasks that the owner still holds, by their files."""
        store, epoch = self._find_record(), self.epoch
        may_renew = holder.epoch <= epoch if holder.beat == 0 else holder.epoch == epoch
        lease = self.leases.renew(info, length, holder, epoch) if may_renew else None
        if lease is None:
            return LeaseReply(epoch, self.leases.beat(info.id), store)
        self._own_claims.start(info.id, lease.path)
        held: dict[str, int] = {}
        cancelled: set[str] = set()
        for known in self._own_claims.all():
            name = self._current_claim(known)
            if name is not None:
                held[name.key] = name.token
                if "c" in name.marks:
                    cancelled.add(name.key)
        renewal = Renewal(held, frozenset(cancelled), self.leases.is_paused(info.id))
        return LeaseReply(epoch, lease.beat, store, renewal)

    def _current_claim(self, known: RowName) -> RowName | None:
        """The name that a claimed task has now. The index is asked only if it is none of the usual."""
        if self.disk.exists(known.path):
            return known
        cancelled = known._replace(version=known.version + 1, marks=f"{known.marks}c")
        if self.disk.exists(cancelled.path):
            return cancelled
        self.files.refresh()
        index = self.files.index
        taken = index.taken.get(known.key)
        name = index.rows.get(known.key) or (None if taken is None else taken.inner)
        if not isinstance(name, RowName) or (name.owner, name.token) != (known.owner, known.token):
            return None
        return name

    def all_leases(self) -> list[backend.Lease]:
        """End abandoned writes; return all leases, and the owners that hold tasks without one."""
        drain_old_layout(self)
        self.files.recheck()
        self.writes.recover()
        self.files.refresh()
        self._read_record()
        # The claims are read before the leases, so an owner that starts now is not among them.
        index = self.files.index
        for name in index.held.get(self._own_claims.owner, {}).values():
            # Also what this owner does not know, because files that it had ended were put back.
            self._own_claims.put(name)
        taken = (each.inner for each in index.taken.values())
        owners = {*index.held, *(each.owner for each in taken if isinstance(each, RowName))} - {""}
        leases = self.leases.all()
        found: list[backend.Lease] = []
        for owner in sorted(owners | leases.keys()):
            lease = leases.get(owner)
            if lease is None:
                found.append(backend.Lease(owner, None, is_live=False))
            else:
                is_live = self.leases.is_live(lease, self.epoch)
                found.append(backend.Lease(owner, self._info(owner), is_live))
        self.leases.remove_leftovers()
        return found

    def _info(self, owner: str) -> WorkerInfo:
        unknown = WorkerInfo(
            id=owner, host="", pid=0, started_at=from_micros(0), last_heartbeat=from_micros(0)
        )
        paused = self.leases.is_paused(owner)
        return msgspec.structs.replace(self.leases.info(owner) or unknown, paused=paused)

    def fence(self, owner: str, *, retires: bool) -> bool:
        """End a lease for good; False if it is valid."""
        lease = self.leases.of(owner)
        if lease is None:
            return True
        self._find_record()
        if not retires and self.leases.is_live(lease, self.epoch):
            return False
        is_fenced = self.leases.fence(lease)
        if not retires:
            hit("file.recover.after_fence")
        return is_fenced

    def check_for_work(self) -> tuple[int | None, bool]:
        """Return when the next task is due, and whether tasks were added since the last claim."""
        self.files.refresh()
        return self.files.index.ready.next_due(), self.files.has_arrivals()
