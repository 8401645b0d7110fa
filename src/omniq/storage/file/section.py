"""Section: one read-modify-write of the engine over the files.

Reading takes nothing: a section remembers the names under which it has found what it read. Its write
renames those names, so it fails (`Moved`) if others have changed any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import nsmallest
from operator import attrgetter

from omniq.errors import QueueFull, StorageError
from omniq.failpoints import hit
from omniq.storage.backend import (
    ANY,
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    Ended,
    Moved,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.file.encoding import DOCUMENT, ENDED, LIVE, EndedTask, Live, NewerRecord
from omniq.storage.file.file_names import DeadName, DocumentName, RowName, document_key
from omniq.storage.file.finished import FinishedTasks
from omniq.storage.file.leases import OwnClaims
from omniq.storage.file.row_names import next_name
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.writes import Prepared, Write, Writes
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim

_TRIES = 50
"""How often a reader looks up a task again whose file was renamed before it could be read."""


class FileSection(Section):
    """A section over the files of a store. `take_seqs` gives new tasks their numbers."""

    def __init__(
        self,
        files: TaskFiles,
        writes: Writes,
        finished: FinishedTasks,
        own_claims: OwnClaims,
        take_seqs: Callable[[int, int], Iterable[int]],
    ) -> None:
        self.now = files.clock.micros()
        self.claimed: list[tuple[RowName, RowName]] = []
        """The claims without gates that this section has made: the names before and after."""
        self._files = files
        self._writes = writes
        self._finished = finished
        self._own_claims = own_claims
        self._take_seqs = take_seqs
        self._sources: dict[str, tuple[RowName, Row]] = {}
        files.refresh()

    # Reading rows

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        unchanged: list[str] = []
        for row in known:
            name, stored = self._files.index.rows.get(row.id), self._files.records.get(row.id)
            if name is None or stored is None or stored[0] != name.content:
                continue
            if (name.owner, name.token, name.marks) == (owner, row.token, ""):
                self._sources[row.id] = name, stored[1]
                unchanged.append(row.id)
        return frozenset(unchanged)

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        found: dict[str, Record] = {}
        for task_id in ids:
            record = self.find(task_id)
            if record is not None:
                found[task_id] = record
        return found

    def find(self, task_id: str) -> Record | None:
        """Return what is stored under an id."""
        try:
            row = self._live(task_id)
        except NewerRecord as error:
            raise StorageError(f"task {task_id} was written by a newer omniq: {error}") from error
        if row is not None:
            return Record(row)
        ended, dead = self._files.ended(task_id), self._files.dead(task_id)
        is_kept = ended is not None and ended.expires_at > self.now
        finished = ended.finished_row if ended is not None and is_kept else None
        if dead is not None:
            return Record(dead.row, finished, dead.letter)
        return None if finished is None else Record(finished.row, finished)

    def _live(self, task_id: str) -> Row | None:
        """Return the row of a live task, also when its file is renamed meanwhile; or None."""
        for _ in range(_TRIES):
            self._writes.settle_key(task_id)
            self._writes.settle_key(f"{task_id}.dead")
            index = self._files.index
            name = index.rows.get(task_id)
            if name is None:
                if task_id not in index.taken:
                    return None
                continue
            row = self._row(name)
            if row is not None:
                return row
            self._files.refresh()
        return None

    def _row(self, name: RowName) -> Row | None:
        record = self._files.record(name)
        row = None if record is None else self._files.row(name, record)
        if row is not None and record is not None:
            # If it is read twice, the first name is the one that the changes are based on.
            self._sources.setdefault(name.key, (name, record))
        return row

    async def live_token(self, task_id: str) -> int | None:
        name = self._files.index.rows.get(task_id)
        if name is None or name.owner:
            return None if name is None else name.token
        row = self._readable(name)
        return None if row is None else row.token

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        self._settle_taken(set(owners))
        found: list[Row] = []
        for owner in owners:
            for name in list(self._files.index.held.get(owner, {}).values()):
                if only_suspects and not self._files.may_be_suspect(name):
                    continue
                row = self._readable(name)
                if row is not None and row.owner == owner and row.crashes >= only_suspects:
                    found.append(row)
        return found

    def _settle_taken(self, owners: set[str]) -> None:
        """Settle the writes that have taken rows of these owners, or with "" waiting rows."""
        for taken in list(self._files.index.taken.values()):
            if isinstance(taken.inner, RowName) and taken.inner.owner in owners:
                self._writes.settle_key(taken.key)

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
        found: dict[str, Document] = {}
        for key in keys:
            current = self._document(kind, key)
            if current is not None:
                found[key] = current[1]
        return found

    def _document(self, kind: str, key: str) -> tuple[DocumentName, Document] | None:
        stored_key = document_key(kind, key)
        for _ in range(_TRIES):
            name = self._files.index.document(stored_key)
            if name is None:
                self._writes.settle_key(stored_key)
                name = self._files.index.document(stored_key)
            if name is None:
                if stored_key not in self._files.index.taken:
                    return None
                continue
            try:
                found = self._files.read_document(name)
            except NewerRecord as error:
                raise StorageError(f"{kind} {key} was written by a newer omniq") from error
            if found is not None:
                return found
            self._files.refresh()
        return None

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        stored = self._files.index.documents.get(query.kind)
        if stored is None:
            return []
        if query.due_by is not None:
            due = stored.due_by(query.due_by, query.limit, query.due_after)
            return list(self._readable_documents(due))
        documents = (
            document
            for document in self._readable_documents(list(stored.by_key.values()))
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
        write = self._writes.new()
        self._plan_documents(write, changes.documents)
        revived = {row.id for row in changes.inserted} & set(changes.deleted_dead)
        self._plan_inserted(write, changes, revived)
        write.removed += [DeadName(task_id) for task_id in revived]
        for row in changes.updated:
            self._plan_updated(write, row)
        for ended in changes.ended:
            self._plan_ended(write, ended)
        for row in changes.checked:
            name, _ = self._sources[row.id]
            write.renamed.append((name, name._replace(version=name.version + 1)))
        claims = [claim for row in changes.claimed if (claim := self._plan_claim(write, row))]
        if not write.is_empty:
            self._writes.commit(write, lambda task_id: self._is_occupied(task_id, revived))
            self._after_commit(write)
        missed = self._claim(claims, has_written=not write.is_empty)
        for task_id in changes.deleted_finished:
            self._finished.delete(task_id, changes.finished_before)
        for task_id in changes.deleted_dead:
            if task_id not in revived:
                self._finished.delete_dead(task_id)
        return missed

    def _plan_documents(self, write: Write, changes: Iterable[DocumentChange]) -> None:
        current: dict[str, tuple[DocumentName | None, bytes | None]] = {}
        made: dict[str, DocumentChange] = {}
        for change in changes:
            key = document_key(change.kind, change.key)
            if key not in current:
                stored = self._document(change.kind, change.key)
                current[key] = (None, None) if stored is None else (stored[0], stored[1].data)
            name, data = current[key]
            if change.before is not ANY and change.before != data:
                if change.if_equal:
                    continue
                raise Moved
            current[key] = name, change.after
            made[key] = change
        for key, change in made.items():
            self._plan_document(write, key, current[key][0], change)

    def _plan_document(
        self, write: Write, key: str, source: DocumentName | None, change: DocumentChange
    ) -> None:
        if change.after is None:
            if source is not None:
                write.removed.append(source)
            return
        document = Document(change.kind, change.key, change.after, change.due)
        prepared = Prepared(key, DOCUMENT.encode(document), document, source)
        (write.inserted if source is None else write.changed).append(prepared)

    def _plan_inserted(self, write: Write, changes: Changes, revived: set[str]) -> None:
        bound, index = changes.bound, self._files.index
        if bound is not None and index.waiting_count + len(changes.inserted) > bound:
            ids = [row.id for row in changes.inserted]
            if any(index.is_live(each) or self._is_occupied(each, revived) for each in ids):
                # Perhaps a repeated call, which adds nothing: its ids decide.
                raise Moved
            raise QueueFull(bound)
        seqs = self._take_seqs(len(changes.inserted), self._files.clock.micros())
        for row, seq in zip(changes.inserted, seqs, strict=True):
            row.seq = seq
            write.inserted.append(Prepared(row.id, LIVE.encode(Live(row)), row))

    def _is_occupied(self, task_id: str, revived: set[str]) -> bool:
        """Whether a task that has ended has the id."""
        if task_id in revived or not self._finished.has_record(task_id):
            return False
        ended = self._files.ended(task_id)
        if ended is not None and ended.expires_at > self.now:
            return True
        return self._files.dead(task_id) is not None

    def _plan_updated(self, write: Write, row: Row) -> None:
        name, record = self._sources[row.id]
        target = next_name(name, record, row)
        if target is not None:
            write.renamed.append((name, target))
            return
        row.body = row.body or record.body
        write.changed.append(Prepared(row.id, LIVE.encode(Live(row)), row, name))
        self._erase(write, record)

    def _plan_ended(self, write: Write, ended: Ended) -> None:
        finished, row = ended.finished, ended.row
        name, record = self._sources[row.id]
        row.body = row.body or record.body
        self._erase(write, record)
        if not row.result_ttl and ended.letter is None:
            write.removed.append(name)
            return
        data = ENDED.encode(
            EndedTask(row, finished.finished_at, finished.expires_at, finished.result, ended.letter)
        )
        write.changed.append(
            Prepared(
                row.id,
                data,
                None,
                name,
                has_result=row.result_ttl > 0,
                is_dead=ended.letter is not None,
            )
        )

    def _erase(self, write: Write, record: Row) -> None:
        if not record.result_ttl:
            write.erased.add(record.id)

    def _plan_claim(self, write: Write, row: Row) -> tuple[RowName, RowName] | None:
        """A claim that can be left out alone; others become a part of the write."""
        name, record = self._sources[row.id]
        target = next_name(name, record, row)
        if target is not None and not row.gates:
            return name, target
        if target is not None:
            write.claimed.append((name, target))
        else:
            self._plan_updated(write, row)
        return None

    def _after_commit(self, write: Write) -> None:
        for name, target in (*write.renamed, *write.claimed):
            self._own(target, self._sources[name.key][1])
        for each in write.changed:
            if isinstance(each.name, RowName) and isinstance(each.record, Row):
                self._own(each.name, each.record)
            else:
                self._own_claims.drop(each.key)
                self._files.records.pop(each.key, None)
        for source in write.removed:
            self._own_claims.drop(source.key)
            self._files.records.pop(source.key, None)

    def _own(self, name: RowName, record: Row) -> None:
        """Remember what this owner holds: its outcome needs the record again."""
        if self._own_claims.put(name):
            self._files.records[name.key] = name.content, record
        else:
            self._files.records.pop(name.key, None)

    def _claim(self, claims: list[tuple[RowName, RowName]], *, has_written: bool) -> frozenset[str]:
        """Claim tasks one by one; returns the ids of those that others took first.

        When a file cannot be renamed, the claims made so far are valid; an error that persists is
        raised by the next call.
        """
        missed: set[str] = set()
        disk, index = self._files.disk, self._files.index
        for position, (name, target) in enumerate(claims):
            try:
                text = str(target)
                index.expect(text, target)
                is_claimed = disk.move(name.path, f"tasks/{text}")
            except OSError:
                if not (self.claimed or has_written):
                    raise
                return frozenset({*missed, *(left.key for left, _ in claims[position:])})
            if not is_claimed:
                missed.add(name.key)
                continue
            self._writes.mark_unsynced("tasks")
            self.claimed.append((name, target))
            self._own(target, self._sources[name.key][1])
            hit("file.claim.after_rename")
        return frozenset(missed)

    def undo_claims(self) -> None:
        """Undo claims whose caller does not learn of them. Their tokens are used again.

        Claims that have entered gates stay; their owner releases them at a renewal.
        """
        for before, after in self.claimed:
            if self._files.disk.move(after.path, before._replace(version=after.version + 1).path):
                self._own_claims.drop(after.key)
        self.claimed = []
        self._writes.mark_unsynced("tasks")
