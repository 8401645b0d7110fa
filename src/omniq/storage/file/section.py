"""Section: one read-modify-write of the engine over the files.

Reading takes nothing: a section remembers the names under which it has found what it read. Its write
renames those names, so it fails (`Moved`) if others have changed any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import nsmallest
from operator import attrgetter
from typing import Any, TypeVar

from msgspec.structs import replace

from omniq.errors import QueueFull, StorageError
from omniq.failpoints import hit
from omniq.storage import backend
from omniq.storage.backend import ANY, Changes, Document, Ended, Moved, Order, Record, Wanted
from omniq.storage.file.encoding import EndedTask, NewerRecord
from omniq.storage.file.file_names import (
    DeadName,
    DocumentName,
    RowName,
    document_key,
    next_name,
)
from omniq.storage.file.finished import FinishedTasks
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.writes import Change, Write, Writes
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim, Witness

T = TypeVar("T")

_TRIES = 50
"""How often a reader looks up a task again whose file was renamed before it could be read."""

_SHORT = 5
"""Characters of a key that are never cut in the name of a document, however they are quoted."""


class FileSection(backend.Section):
    """A section over the files of a store. `take_seqs` gives new tasks their numbers."""

    def __init__(
        self,
        files: TaskFiles,
        writes: Writes,
        finished: FinishedTasks,
        take_seqs: Callable[[int, int], Iterable[int]],
    ) -> None:
        self.now = files.clock.micros()
        self.claimed: list[Change] = []
        """The claims without gates that this section has made."""
        self._has_claimed = False
        self._witness: Witness | None = None
        self._files = files
        self._writes = writes
        self._finished = finished
        self._own_claims = files.own_claims
        self._take_seqs = take_seqs
        self._sources: dict[str, tuple[RowName, Row]] = {}
        self._letters: dict[str, tuple[int, int]] = {}
        """What tells the dead letters that were read from later ones of the same tasks: a letter's name does not."""
        self._ends: dict[str, int] = {}
        """When the tasks had ended whose records were read."""
        files.refresh()

    # Reading rows

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        self._witness = None if claim is None else claim.witness
        unchanged: list[str] = []
        for row in known:
            name, record = self._own_claims.claims.get(row.id, (None, None))
            if name is None or record is None or self._files.index.rows.get(row.id) != name:
                continue
            if record.attached:
                # Others have stored a new record of it since it was claimed.
                continue
            if (name.owner, name.token, name.marks) == (owner, row.token, ""):
                self._sources[row.id] = name, record
                unchanged.append(row.id)
        return frozenset(unchanged)

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        records = {task_id: self.find(task_id) for task_id in ids}
        return {task_id: record for task_id, record in records.items() if record is not None}

    def find(self, task_id: str) -> Record | None:
        """Return what is stored under an id."""
        row = self._live(task_id)
        if row is not None:
            return Record(row)
        ended, dead = self._finished.ended(task_id), self._finished.dead(task_id)
        is_kept = ended is not None and ended.expires_at > self.now
        finished = ended.finished_row if ended is not None and is_kept else None
        if finished is not None:
            self._ends[task_id] = finished.finished_at
        if dead is not None:
            self._letters[task_id] = _identity_of(dead)
            return Record(dead.row, finished, dead.letter)
        return None if finished is None else Record(finished.row, finished)

    def _live(self, task_id: str) -> Row | None:
        self._writes.settle_key(DeadName(task_id).key)
        return self._current(task_id, self._row)

    def _current(self, key: str, read: Callable[[Any], T | None]) -> T | None:
        """Read what has that key now, also when its file is renamed meanwhile; or None."""
        for _ in range(_TRIES):
            self._writes.settle_key(key)
            name = self._files.index.current(key)
            if name is None:
                if key not in self._files.index.taken:
                    return None
                continue
            try:
                found = read(name)
            except NewerRecord as error:
                raise StorageError(f"{key} was written by a newer omniq: {error}") from error
            if found is not None:
                return found
            self._files.refresh()
        return None

    def _row(self, name: RowName) -> Row | None:
        found = self._files.read_row(name)
        if found is None:
            return None
        row, record = found
        # If it is read twice, the first name is the one that the changes are based on.
        self._sources.setdefault(name.key, (name, record))
        return row

    async def live_token(self, task_id: str) -> int | None:
        name = self._files.index.rows.get(task_id)
        if name is not None and name.owner:
            return name.token
        # Without a name, another process may be writing it: the row is not missing then.
        row = self._live(task_id)
        return None if row is None else row.token

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        self._settle_taken(set(owners))
        found: list[Row] = []
        for owner in owners:
            for name in list(self._files.index.held.get(owner, {}).values()):
                known = self._own_claims.record(name)
                if only_suspects and known is not None and not known.is_suspect:
                    continue
                row = self._readable(name)
                if row is not None and row.owner == owner and row.crashes >= only_suspects:
                    found.append(row)
        return found

    def _settle_taken(self, owners: set[str]) -> None:
        """Settle the writes that have taken rows of these owners, or with "" waiting rows."""
        for name in self._files.index.taken_rows():
            if name.owner in owners:
                self._writes.settle_key(name.key)

    def _readable(self, name: RowName) -> Row | None:
        """The row with that name; None if it is gone, or of a newer format and so left alone."""
        try:
            row = self._row(name)
        except NewerRecord:
            return None
        if row is None and self._files.index.is_live(name.key):
            row = self._live(name.key)
        return row

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        self._files.read_arrivals()
        found: list[Row] = []
        while len(found) < limit:
            ready = self._files.index.ready
            ready.promote(wanted.due_by)
            page = ready.candidates(wanted, after, limit - len(found))
            if not page:
                break
            after = page[-1].order
            found += self._waiting(row.id for row in page)
        return found

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        # A write that parks a row may have changed the gate already, and not yet the row.
        self._settle_taken({""})
        self._files.read_unread()
        parked = [row.id for row in self._files.index.ready.parked(keys, limit)]
        return [row for row in self._waiting(parked) if row.parked is not None]

    def _waiting(self, ids: Iterable[str]) -> Iterator[Row]:
        """The rows of these tasks, without those that others have changed meanwhile."""
        for task_id in ids:
            name = self._files.index.rows.get(task_id)
            if name is not None and not name.owner:
                row = self._row(name)
                if row is not None:
                    yield row

    # Reading documents

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        found = {key: self._document(kind, key) for key in keys}
        return {key: current[1] for key, current in found.items() if current is not None}

    def _document(self, kind: str, key: str) -> tuple[DocumentName, Document] | None:
        return self._current(document_key(kind, key), self._files.read_document)

    async def find_documents(self, query: backend.DocumentQuery) -> list[Document]:
        stored = self._files.index.documents.get(query.kind)
        if stored is None:
            return []
        if query.due_by is not None:
            return list(self._readable_documents(stored.find(query)))
        # Only its beginning: a long key is cut in the name.
        prefix = document_key(query.kind, query.prefix[:_SHORT])
        names = [name for name in stored.by_key.values() if name.key.startswith(prefix)]
        if all(name.is_plain for name in names):
            # What they are called is what they are sorted by: only those of the page are read.
            after = f"{query.kind}~{query.after}"
            wanted = (name for name in names if name.key > after)
            names = nsmallest(query.limit, wanted, key=attrgetter("key"))
        documents = (
            document
            for document in self._readable_documents(names)
            if document.key > query.after and document.key.startswith(query.prefix)
        )
        return nsmallest(query.limit, documents, key=attrgetter("key"))

    def _readable_documents(self, names: Iterable[DocumentName]) -> Iterator[Document]:
        for name in names:
            with suppress(NewerRecord):
                found = self._files.read_document(name)
                if found is not None:
                    yield found[1]

    # Writing

    async def write(self, changes: Changes) -> frozenset[str]:
        write = Write(self._files.disk.nonce())
        inserted = {row.id for row in changes.inserted}
        revived = inserted & set(changes.deleted_dead)
        restored = inserted & set(changes.deleted_finished) - revived
        planned, claims = write.changes, list[Change]()
        planned += self._changed_documents(changes.documents)
        planned += self._inserted(changes, revived, restored)
        planned += [Change(DeadName(each).key, DeadName(each)) for each in revived]
        planned += map(self._updated, changes.updated)
        planned += map(self._ended, changes.ended)
        for row in changes.checked:
            name, _ = self._sources[row.id]
            planned.append(Change(row.id, name, replace(name, version=name.version + 1)))
        for row in changes.claimed:
            each = self._updated(row)
            each.is_claim = each.record is None
            # A claim without gates can be left out alone; others are a part of the write.
            (claims if each.is_claim and not row.gates else planned).append(each)
        # What is put back into its queue may end again, and have a new record, right after the commit.
        limits = dict.fromkeys(changes.deleted_finished, changes.finished_before)
        for task_id in (revived | restored) & limits.keys():
            ended = self._finished.ended(task_id)
            limits[task_id] = 0 if ended is None else ended.finished_at + 1
        if planned:
            self._writes.commit(
                write, lambda task_id: self._is_occupied(task_id, revived, restored)
            )
            for each in planned:
                self._own(each)
        self._has_claimed = bool(changes.claimed)
        missed = self._claim(claims, has_written=bool(planned))
        for task_id, finished_before in limits.items():
            self._finished.delete(task_id, finished_before)
        for task_id in changes.deleted_dead:
            if task_id not in revived:
                read = self._letters.get(task_id)
                self._finished.delete_dead(task_id, None if read is None else read[1] + 1)
        return missed

    def _changed_documents(self, changes: Iterable[backend.DocumentChange]) -> Iterable[Change]:
        planned: dict[str, Change] = {}
        current: dict[str, bytes | None] = {}
        for change in changes:
            key = document_key(change.kind, change.key)
            each = planned.get(key)
            if each is None:
                source, stored = self._document(change.kind, change.key) or (None, None)
                each = Change(key, source)
                current[key] = None if stored is None else stored.data
            if change.before is not ANY and change.before != current[key]:
                if change.if_equal:
                    continue
                raise Moved
            planned[key], current[key] = each, change.after
            each.record = None
            if change.after is not None:
                each.record = Document(change.kind, change.key, change.after, change.due)
        # What is added and deleted by the same changes was never there.
        return [each for each in planned.values() if (each.source, each.record) != (None, None)]

    def _inserted(
        self, changes: Changes, revived: set[str], restored: set[str]
    ) -> Iterator[Change]:
        bound, index = changes.bound, self._files.index
        if bound is not None and index.waiting_count + len(changes.inserted) > bound:
            ids = [row.id for row in changes.inserted]
            if any(
                index.is_live(each) or self._is_occupied(each, revived, restored) for each in ids
            ):
                # Perhaps a repeated call, which adds nothing: its ids decide.
                raise Moved
            raise QueueFull(bound)
        seqs = self._take_seqs(len(changes.inserted), self._files.clock.micros())
        for row, seq in zip(changes.inserted, seqs, strict=True):
            row.seq = seq
            if row.turn == row.due:
                # Its default, which is not stored.
                row.turn = None
            yield Change(row.id, record=row)

    def _is_occupied(self, task_id: str, revived: set[str], restored: set[str]) -> bool:
        """Whether a task that has ended has the id; another one than that whose letter or record was read."""
        if task_id in revived:
            dead = self._finished.dead(task_id)
            return dead is None or _identity_of(dead) != self._letters.get(task_id)
        if not self._finished.has_record(task_id):
            return False
        ended = self._finished.ended(task_id)
        if ended is not None and ended.expires_at > self.now:
            is_read = task_id in restored and self._ends.get(task_id) == ended.finished_at
            return not is_read
        return self._finished.dead(task_id) is not None

    def _updated(self, row: Row) -> Change:
        name, record = self._sources[row.id]
        target = next_name(name, record, row)
        if target is not None:
            return Change(row.id, name, target)
        row.body = row.body or record.body
        return Change(row.id, name, record=row, is_erased=not record.result_ttl)

    def _ended(self, ended: Ended) -> Change:
        finished, row = ended.finished, ended.row
        name, record = self._sources[row.id]
        row.body = row.body or record.body
        change = Change(row.id, name, is_erased=not record.result_ttl)
        if row.result_ttl or ended.letter is not None:
            instants = finished.finished_at, finished.expires_at
            change.record = EndedTask(row, *instants, finished.result, ended.letter)
        return change

    def _own(self, each: Change) -> None:
        """Remember the new name of a task, if this owner holds it."""
        if isinstance(each.source, RowName):
            if isinstance(each.target, RowName):
                record = each.record if isinstance(each.record, Row) else self._sources[each.key][1]
                self._own_claims.put(each.target, record)
            else:
                self._own_claims.claims.pop(each.key, None)

    def _claim(self, claims: list[Change], *, has_written: bool) -> frozenset[str]:
        """Claim tasks one by one; returns the ids of those that others took first.

        When a file cannot be renamed, the claims made so far are valid; an error that persists is
        raised by the next call.
        """
        missed: set[str] = set()
        for position, each in enumerate(claims):
            try:
                is_claimed = self._writes.claim(each)
            except OSError:
                if not (self.claimed or has_written):
                    raise
                return frozenset({*missed, *(left.key for left in claims[position:])})
            if not is_claimed:
                missed.add(each.key)
                continue
            self.claimed.append(each)
            self._own(each)
            hit("file.claim.after_rename")
        return frozenset(missed)

    def has_gone_back(self) -> bool:
        """Whether the folder was put back while this section claimed: its claims may have older tokens.

        A name that was renamed by another owner is then there again. The engine has looked at the newest claim of
        this owner before; only this look, after the renames, shows what was put back between the two.
        """
        witness = self._witness
        if witness is None or not self._has_claimed:
            return False
        self._files.refresh()
        token = backend.complete(self.live_token(witness.id))
        if token is None or token >= witness.token:
            return False
        row = self._live(witness.id)
        # One that was enqueued later under its id has other numbers.
        return row is not None and (row.seq, row.nonce) == (witness.seq, witness.nonce)

    def undo_claims(self) -> None:
        """Undo claims whose caller does not learn of them. Their tokens are used again.

        Claims that have entered gates stay; their owner releases them at a renewal.
        """
        for each in self.claimed:
            if self._writes.unclaim(each):
                self._own_claims.claims.pop(each.key, None)
        self.claimed = []


def _identity_of(dead: EndedTask) -> tuple[int, int]:
    return dead.row.token, dead.finished_at
