"""Task files: follows the folder `tasks`, and reads the records of tasks and documents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

from omniq.clock import Clock
from omniq.failpoints import hit
from omniq.storage.backend import Document
from omniq.storage.file.encoding import DOCUMENT, LIVE, NewerRecord, NotARecord, decode_waiting
from omniq.storage.file.file_names import DocumentName, Name, RowName, document_key, path_of, row_of
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.index import Index
from omniq.storage.file.leases import OwnClaims
from omniq.storage.file.shared_file import SharedFile, open_shared, unpack_one
from omniq.storage.file.wakeups import FolderWatch
from omniq.storage.row_rules import Row

T = TypeVar("T")

_LISTINGS = 50
"""How often a folder is listed again that changes while it is listed."""

_RESCAN_AFTER = 60.0
"""Seconds between full listings. A folder of a hundred thousand names takes almost one to list."""

_CACHED_FILES = 128
_LARGEST_CACHED = 65_536
_CACHED_DOCUMENTS = 10_000


class TaskFiles:
    """The folder `tasks`: an index of its names, and the records under them."""

    def __init__(self, disk: Disk, clock: Clock, own_claims: OwnClaims) -> None:
        self.disk = disk
        self.clock = clock
        self.index = Index(f".{disk.own_prefix}")
        self.watch: FolderWatch | None = None
        self.own_claims = own_claims
        self.was_restored = False
        """Whether files were put back since the last full listing, which may have hidden others."""
        self._may_watch = True
        self._scanned_at = -1
        self._rescanned_at: float | None = None
        self._arrivals_seen = 0
        self._unreadable: set[RowName] = set()
        self._files: dict[str, SharedFile] = {}
        self._documents: dict[str, tuple[DocumentName, Document]] = {}

    def close(self) -> None:
        """Close; does nothing when called again."""
        if self.watch is not None:
            self.watch.close()

    # Following changes of the folder

    def refresh(self) -> None:
        """Update the index."""
        is_scanned = self._rescanned_at is not None
        if self.watch is not None and is_scanned:
            events = self.watch.read()
            if events is not None:
                if events:
                    self.index.apply(events, self.clock.micros())
                    self._settle_doubles()
                return
        elif is_scanned and self.disk.folder_changed_at("tasks") == self._scanned_at:
            return
        self.rescan()

    def distrust_index(self) -> None:
        """Have the next `refresh` list the folder; until a listing succeeds, no call does anything else."""
        self._rescanned_at = None

    def forget_index(self) -> None:
        """Forget all names: an interrupt may have left the index half changed."""
        self.index = Index(f".{self.disk.own_prefix}")
        self.distrust_index()

    def recheck(self) -> None:
        """Update the index; once a minute by a full listing, in case the watch missed a change."""
        before = None if self.was_restored else self._rescanned_at
        if before is None or self.clock.monotonic() - before > _RESCAN_AFTER:
            self.rescan()
        else:
            self.refresh()

    def rescan(self) -> None:
        """Read the names of the whole folder."""
        hit("file.index.before_listing")
        if self._may_watch and self.watch is None:
            # Opened as late as possible: inotify watches are limited, and many storages need none.
            self.watch = FolderWatch.open(self.disk.folder("tasks"))
            self._may_watch = self.watch is not None
        for _ in range(_LISTINGS):
            # A listing may miss a name that is moved meanwhile: the events include it.
            if self.watch is not None:
                self.watch.read()
            changed_at = self.disk.folder_changed_at("tasks")
            # The folder's time is reliable only if a change from now on would get a later time.
            is_settled = self.watch is None and self.disk.disk_time() > changed_at
            now = self.clock.micros()
            self.index = Index.rebuilt(self.index, self.disk.names("tasks"), now)
            if self.watch is not None:
                events = self.watch.read()
                if events is not None:
                    self.index.apply(events, now)
                    break
            elif self.disk.folder_changed_at("tasks") == changed_at:
                self._scanned_at = changed_at if is_settled else -1
                break
        self._rescanned_at = self.clock.monotonic()
        self.was_restored = False
        self._unreadable.clear()
        self._settle_doubles()

    def _settle_doubles(self) -> None:
        """Remove one of two names of a task or document, of which a restore has put back the older.

        Every process chooses the same one, so that never both are removed.
        """
        doubles, self.index.doubles = self.index.doubles, []
        for name in doubles:
            known = self.index.current(name.key)
            # A listing that has both names of a rename is followed by the event of the new one.
            if known == name or not self.disk.exists(path_of(name)):
                continue
            if known is not None and self.disk.exists(path_of(known)):
                # Asked again: if it is gone, it was renamed from this name to the known one meanwhile.
                if not self.disk.exists(path_of(name)):
                    continue
                self.was_restored = True
                older = min(known, name, key=self._age)
                self.disk.remove_quietly(path_of(older))
                if older == name:
                    continue
            self.index.replace(known, name, self.clock.micros())

    def _age(self, name: RowName | DocumentName) -> tuple[int, str, int, str]:
        if isinstance(name, DocumentName):
            # That of the store's record is its epoch.
            return -1 if name.due is None else name.due, name.content, 0, ""
        token = -1
        with suppress(NewerRecord):
            found = self.read_row(name)
            token = -1 if found is None else found[0].token
        return token, name.content, name.version, str(name)

    def read_arrivals(self) -> None:
        """Read the order of all waiting tasks, for a claim."""
        self.read_unread()
        self._arrivals_seen = self.index.arrivals

    def has_arrivals(self) -> bool:
        """Whether tasks were added that no claim of this storage has considered yet."""
        return self.index.arrivals != self._arrivals_seen

    def read_unread(self) -> None:
        """Read the order of every waiting task that was not read yet."""
        now = self.clock.micros()
        # Tasks of one file are read together.
        for name in sorted(self.index.unread.values(), key=attrgetter("content")):
            if name in self._unreadable:
                continue
            try:
                waiting = self._read(name, decode_waiting, attrgetter("id"))
            except (PermissionError, NewerRecord):
                # Left alone; it delays no other task. The next listing tries again.
                self._unreadable.add(name)
                continue
            if waiting is not None:
                self.index.set_order(name, waiting, now)

    # Reading

    def read_row(self, name: RowName) -> tuple[Row, Row] | None:
        """Return the row with that name, and its record with the body; None when the name is gone."""
        record = self.own_claims.record(name)
        if record is None:
            live = self._read(name, LIVE.decode, attrgetter("row.id"))
            if live is None:
                return None
            record = live.row
        try:
            return row_of(name, record), record
        except NotARecord as error:
            self._quarantine(name, str(error))
            return None

    def is_erased(self, path: str, name: Name | None) -> bool:
        """Whether the task that a write has taken there must be overwritten: nothing of it is kept."""
        try:
            data = self.disk.read(path)
            if data is None or not isinstance(name, RowName):
                return False
            return not LIVE.decode(unpack_one(data, name.key)).row.result_ttl
        except (NotARecord, NewerRecord):
            return False

    def read_document(self, name: DocumentName) -> tuple[DocumentName, Document] | None:
        """Return the document with that name, with the name; None when it is gone."""
        known = self._documents.get(name.key)
        if known is not None and known[0] == name:
            return known
        document = self._read(name, DOCUMENT.decode, lambda each: document_key(each.kind, each.key))
        if document is None:
            return None
        self.know_document(name, document)
        return name, document

    def know_document(self, name: DocumentName, document: Document) -> None:
        """Remember the contents of a document."""
        if len(self._documents) >= _CACHED_DOCUMENTS:
            self._documents.clear()
        self._documents[name.key] = name, document

    def _read(
        self,
        name: RowName | DocumentName,
        decode: Callable[[bytes], T],
        key_of: Callable[[T], str],
    ) -> T | None:
        try:
            data = self._load(name)
            if data is None:
                self.index.discard(name)
                return None
            record = decode(data)
            if key_of(record) != name.key:
                raise NotARecord(f"the record of another task, {key_of(record)}")
        except NotARecord as error:
            self._quarantine(name, str(error))
            return None
        return record

    def _load(self, name: RowName | DocumentName) -> bytes | None:
        """Read a record, and remember its file: the next one is often in the same."""
        file = self._files.get(name.content)
        if file is None:
            data = self.disk.read(path_of(name))
            if data is None:
                return None
            file = open_shared(data)
            if file is None:
                return data
            if len(data) <= _LARGEST_CACHED:
                if len(self._files) >= _CACHED_FILES:
                    del self._files[next(iter(self._files))]
                self._files[name.content] = file
        start, size = file.find(name.key)
        return file.data[start : start + size]

    def _quarantine(self, name: RowName | DocumentName, why: str) -> None:
        """Move a file that is not a record to `corrupt/`."""
        self.disk.quarantine(path_of(name), why)
        self.index.discard(name)
