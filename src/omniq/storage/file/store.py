"""Store: carries out the calls of the backend, with blocking system calls, in one thread."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from omniq.clock import Clock, from_micros
from omniq.errors import LeaseLost
from omniq.failpoints import hit
from omniq.models import WorkerInfo
from omniq.settings import Settings
from omniq.storage import backend
from omniq.storage.backend import Changes, DocumentChange, Moved, Work, complete, largest_value
from omniq.storage.file.file_names import RowName, document_key, path_of
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.finished import FinishedTasks
from omniq.storage.file.leases import Leases, OwnClaims
from omniq.storage.file.queries import Queries
from omniq.storage.file.section import FileSection
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.upgrade import drain_old_layout
from omniq.storage.file.writes import Writes, boot_mark
from omniq.storage.incarnation import STORE, check_reader, decode_record, new_record
from omniq.storage.permissions import store_rules
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


_sequence = SequenceNumbers()


class Store:
    """One folder. Call `open` first; after that every method leaves the store consistent."""

    def __init__(self, root: Path, clock: Clock, own_claims: OwnClaims, settings: Settings) -> None:
        self._clock = clock
        self._own_claims = own_claims
        self.disk = Disk(
            root,
            is_durable=settings.durability == "power",
            rules=store_rules(settings),
            nonce_prefix=boot_mark(clock) + clock.new_id()[-_NONCE_LENGTH:],
            largest=largest_value(settings.max_payload),
        )
        self.files = TaskFiles(self.disk, clock, own_claims)
        self.writes = Writes(self.files, clock)
        self.finished = FinishedTasks(self.files)
        self.leases = Leases(self.disk, clock)
        self._was_interrupted = False

    def open(self) -> None:
        """Create the missing folders, and move what an older version has stored to the new ones."""
        self._own_claims.folder = self.disk.open(self._own_claims.folder)
        try:
            drain_old_layout(self, is_opening=True)
            while self._find_record() is None:
                self._add_record()
        except BaseException:
            self.close()
            raise

    def _add_record(self) -> None:
        """Describe a new store. Of several processes that open it, one succeeds."""
        record = DocumentChange(STORE, STORE, None, new_record(self._clock.new_id()), due=0)
        with suppress(Moved):
            complete(self.section().write(Changes(documents=[record])))
        self.writes.flush()

    def close(self) -> None:
        """Close; does nothing when called again."""
        self.files.close()
        self.disk.close()

    # Sections

    def interrupt(self) -> None:
        """Ctrl-C has interrupted a call of this store, perhaps between a rename and the note of it here.

        The next call reads the folder, and ends the write as if the process had died in it.
        """
        self._was_interrupted = True
        self.files.forget_index()

    def section(self) -> FileSection:
        """A new section on what is stored now."""
        if self._was_interrupted:
            self.files.refresh()
            self.writes.recover()
            self._was_interrupted = False
        section = FileSection(self.files, self.writes, self.finished, _sequence.take)
        self._read_record()
        return section

    def _read_record(self) -> bytes | None:
        """Read the store's record, if it has changed; refuse one that needs a newer omniq."""
        name = self.files.index.document(_STORE)
        if name != self._own_claims.store[0]:
            found = None if name is None else self.files.read_document(name)
            data = None if found is None else found[1].data
            check_reader(decode_record(data))
            self.files.was_restored = True
            self._own_claims.store = name, data
        return self._own_claims.store[1]

    def _find_record(self) -> bytes | None:
        """Read the store's record, without the index if it has not changed: a heartbeat needs no index."""
        name, data = self._own_claims.store
        if name is not None and self.disk.exists(path_of(name)):
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
            if section.has_gone_back():
                # The engine looks again, and raises the epoch. Claims that have entered gates are given back then.
                section.undo_claims()
                raise Moved
        finally:
            self.writes.flush()
        return result

    def undo_claims(self, section: FileSection) -> None:
        """Undo the claims of a section whose caller was cancelled."""
        self.files.refresh()
        section.undo_claims()
        self.writes.flush()

    def queries(self) -> Queries:
        """What is stored now, to count and to list it."""
        return Queries(self.files, self.finished, self.section())

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
        self.disk.check_folders()
        store, epoch = self._find_record(), self.epoch
        may_renew = holder.epoch <= epoch if holder.beat == 0 else holder.epoch == epoch
        lease = self.leases.renew(info, length, holder, epoch) if may_renew else None
        if lease is None:
            return LeaseReply(epoch, self.leases.beat(info.id), store)
        self._own_claims.start(info.id, lease.path)
        held: dict[str, int] = {}
        cancelled: set[str] = set()
        for known, _ in list(self._own_claims.claims.values()):
            name = self._current_claim(known)
            if name is not None:
                held[name.key] = name.token
                if "c" in name.marks:
                    cancelled.add(name.key)
        renewal = Renewal(held, frozenset(cancelled), self.leases.is_paused(info.id))
        return LeaseReply(epoch, lease.beat, store, renewal)

    def _current_claim(self, known: RowName) -> RowName | None:
        """The name that a claimed task has now. The index is asked only if it is none of the usual."""
        if self.disk.exists(path_of(known)):
            return known
        cancelled = replace(known, version=known.version + 1, marks=f"{known.marks}c")
        if self.disk.exists(path_of(cancelled)):
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
        self.disk.check_folders()
        drain_old_layout(self)
        self.files.recheck()
        self.writes.recover()
        self.files.refresh()
        self._read_record()
        # The claims are read before the leases, so an owner that starts now is not among them.
        index = self.files.index
        for name in index.held.get(self._own_claims.owner, {}).values():
            # Also what this owner does not know, because files that it had ended were put back.
            self._own_claims.put(name, self._own_claims.record(name))
        owners = {*index.held, *(name.owner for name in index.taken_rows())} - {""}
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

    def _info(self, owner: str) -> WorkerInfo | None:
        if not self.leases.has_info(owner):
            # Its first renewal is under way, which writes that after the lease.
            return None
        unknown = WorkerInfo(
            id=owner, host="", pid=0, started_at=from_micros(0), last_heartbeat=from_micros(0)
        )
        paused = self.leases.is_paused(owner)
        return replace(self.leases.info(owner) or unknown, paused=paused)

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
        """Return when a task or a gate is due next, and whether tasks were added since the last claim."""
        self.files.refresh()
        return self.files.index.next_due(), self.files.has_arrivals()
