"""Everything that a store holds, in memory: rows, records of ended tasks, dead letters, documents, leases.

For backends that hold their state in the process. Rows that are stored here are never changed in place:
a section gets copies, and `apply` replaces them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from omniq.errors import QueueFull
from omniq.models import StoredLetter, TaskStatus, WorkerInfo
from omniq.storage.backend import (
    ANY,
    Changes,
    Counts,
    Document,
    DocumentChange,
    DocumentQuery,
    FinishedQuery,
    Lease,
    Moved,
    Order,
    Record,
    Section,
    Wanted,
)
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.inspection import (
    DeadQuery,
    Scan,
    ScanQuery,
    TaskQuery,
    cursor_sequence,
    letter_matches,
    row_matches,
    scan_by_sequence,
)
from omniq.storage.ready_rows import ReadyRows
from omniq.storage.row_rules import FinishedRow, Row, copy_of, first_token
from omniq.storage.types import Claim, Holder, LeaseReply, Renewal


class StoredLease(msgspec.Struct, frozen=True):
    """An owner's lease, which ends at `until` on the clock of leases."""

    info: WorkerInfo
    until: int
    epoch: int = 0
    beat: int = 0


class StoredFence(msgspec.Struct, frozen=True):
    """When an owner was fenced, and the beat that its lease had."""

    at: int
    beat: int


class StoredDead(msgspec.Struct, frozen=True):
    """A dead letter, and the row from which its task can be retried."""

    letter: StoredLetter
    row: Row


_MAX_STALE = 1_000
"""Stale instants that the documents of one kind may have."""


class HasDue(Protocol):
    """A document, or what a store knows of one without reading it."""

    @property
    def key(self) -> str: ...

    @property
    def due(self) -> int | None: ...


D = TypeVar("D", bound=HasDue)


class Documents(Generic[D]):
    """The documents of one kind."""

    def __init__(self) -> None:
        self.by_key: dict[str, D] = {}
        self._due: list[tuple[int, str]] = []

    def put(self, document: D) -> None:
        """Add a document, or replace it."""
        self.by_key[document.key] = document
        if document.due is None:
            return
        heapq.heappush(self._due, (document.due, document.key))
        if len(self._due) > _MAX_STALE + 2 * len(self.by_key):
            # Instants of replaced documents, which leave by themselves only when they have come.
            self._due = [
                (each.due, each.key) for each in self.by_key.values() if each.due is not None
            ]
            heapq.heapify(self._due)

    def find(self, query: DocumentQuery) -> list[D]:
        """The documents that the query describes."""
        if query.due_by is not None:
            return list(self._due_between(query.due_after, query.due_by, query.limit))
        keys = (key for key in self.by_key if key > query.after and key.startswith(query.prefix))
        return [self.by_key[key] for key in heapq.nsmallest(query.limit, keys)]

    def next_due(self) -> int | None:
        """The first instant at which a document is due."""
        while self._due:
            due, key = self._due[0]
            document = self.by_key.get(key)
            if document is not None and document.due == due:
                return due
            heapq.heappop(self._due)
        return None

    def _due_between(self, after: int, instant: int, limit: int) -> Iterator[D]:
        found: dict[str, int] = {}
        while self._due and self._due[0][0] <= instant and limit > 0:
            due, key = heapq.heappop(self._due)
            document = self.by_key.get(key)
            if document is not None and document.due == due and key not in found:
                found[key] = due
                if due > after:
                    limit -= 1
                    yield document
        for key, due in found.items():
            heapq.heappush(self._due, (due, key))


class Tables:
    """The state of a store. Only `set_row`, `set_document` and `put` change it, each one entry."""

    def __init__(self) -> None:
        self.seq = 0
        self.rows: dict[str, Row] = {}
        self.ready = ReadyRows()
        self.held: dict[str, dict[str, Row]] = {}
        self.finished: dict[str, FinishedRow] = {}
        self.dead: dict[str, StoredDead] = {}
        self.documents: defaultdict[str, Documents[Document]] = defaultdict(Documents)
        self.leases: dict[str, StoredLease] = {}
        self.fenced: dict[str, StoredFence] = {}
        """Owners that can have no lease any more."""
        self._tables: dict[str, dict[str, Any]] = {
            "finished": self.finished,
            "dead": self.dead,
            "lease": self.leases,
            "fenced": self.fenced,
        }

    # Changing

    def write(self, changes: Changes, now: int) -> None:
        """Make the changes, or raise `Moved` or `QueueFull`."""
        self._check(changes, now)
        self._apply(changes, now)

    def _check(self, changes: Changes, now: int) -> None:
        for change in changes.documents:
            if not (change.if_equal or change.before is ANY or self._is_before(change)):
                raise Moved
        rows, dead, finished = self.rows, self.dead, self.finished
        for row in changes.inserted:
            task_id = row.id
            if (
                (task_id in rows or task_id in dead or task_id in finished)
                and self.record_of(task_id, now) is not None
                and task_id not in changes.deleted_dead
                and task_id not in changes.deleted_finished
            ):
                raise Moved
        bound = changes.bound
        if bound is not None and len(self.ready.rows) + len(changes.inserted) > bound:
            raise QueueFull(bound)

    def _apply(self, changes: Changes, now: int) -> None:
        before = changes.finished_before
        for task_id in changes.deleted_finished:
            known = self.finished.get(task_id)
            if known is not None and (before is None or known.finished_at < before):
                self.put("finished", task_id, None)
        for task_id in changes.deleted_dead:
            self.put("dead", task_id, None)
        for row in changes.inserted:
            self.seq += 1
            row.seq = self.seq
            if row.id in self.finished:
                self.put("finished", row.id, None)
            self.set_row(row.id, row, now)
        if changes.claimed:
            self.set_claimed(changes.claimed, now)
        for row in changes.updated:
            self.set_row(row.id, row, now)
        for ended in changes.ended:
            row = ended.finished.row
            self.set_row(row.id, None, now)
            if row.result_ttl:
                self.put("finished", row.id, ended.finished)
            if ended.letter is not None:
                self.put("dead", row.id, StoredDead(ended.letter, row))
        for change in changes.documents:
            kind, key, after = change.kind, change.key, change.after
            if not change.if_equal or self._is_before(change):
                document = None if after is None else Document(kind, key, after, change.due)
                self.set_document(kind, key, document)

    def _is_before(self, change: DocumentChange) -> bool:
        """Whether the document is as it has to be before the change."""
        stored = self.documents[change.kind].by_key.get(change.key)
        return (None if stored is None else stored.data) == change.before

    def set_row(self, task_id: str, row: Row | None, now: int) -> None:
        """Store a live row, or remove it with None."""
        before = self.rows.get(task_id)
        if before is not None:
            if before.owner is not None:
                held = self.held[before.owner]
                del held[task_id]
                if not held:
                    del self.held[before.owner]
            elif row is None or row.owner is not None:
                self.ready.discard(task_id)
            if row is not None and not row.body:
                # A section may have read the row without its body.
                row.body = before.body
        if row is None:
            del self.rows[task_id]
            return
        self.rows[task_id] = row
        if row.owner is None:
            self.ready.put(row, now)
        else:
            self.held.setdefault(row.owner, {})[task_id] = row

    def set_claimed(self, rows: list[Row], now: int) -> None:
        """Store rows that one owner has claimed: `set_row` of each, faster."""
        claimed = {row.id: row for row in rows}
        self.rows.update(claimed)
        self.held.setdefault(rows[0].owner or "", {}).update(claimed)
        self.ready.discard_all(claimed)

    def put(self, table: str, key: str, value: Any) -> None:
        """Store an entry of the table `finished`, `dead`, `lease` or `fenced`; delete it with None."""
        entries = self._tables[table]
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value

    def set_document(self, kind: str, key: str, document: Document | None) -> None:
        """Store a document, or delete it with None."""
        if document is None:
            self.documents[kind].by_key.pop(key, None)
        else:
            self.documents[kind].put(document)
        if kind == "store":
            self.seq = max(self.seq, first_token(self.epoch))

    def document(self, kind: str, key: str) -> Document | None:
        """The document with that key, or None."""
        return self.documents[kind].by_key.get(key)

    def next_due(self) -> int | None:
        """When the first delayed row becomes visible, or a gate may have room for parked ones."""
        instants = (self.ready.next_due(), self.documents[GATE].next_due())
        return min((each for each in instants if each is not None), default=None)

    # Leases: `now` and `until` are instants on the clock of leases.

    @property
    def epoch(self) -> int:
        """The store's epoch."""
        record = self.document("store", "store")
        return 0 if record is None else record.due or 0

    def has_lease(self, holder: Holder) -> bool:
        """Whether the owner has a lease of this epoch, at least as new as it knows."""
        lease = self.leases.get(holder.owner)
        return (
            lease is not None
            and lease.epoch == holder.epoch == self.epoch
            and lease.beat >= holder.beat
        )

    def renew(self, info: WorkerInfo, until: int, holder: Holder) -> LeaseReply:
        """Extend the lease of an owner."""
        owner, epoch = info.id, self.epoch
        known = self.leases.get(owner)
        before = known or self.fenced.get(owner)
        beat = 0 if before is None else before.beat
        record = self.document("store", "store")
        store = None if record is None else record.data
        is_first = holder.beat == 0 and owner not in self.fenced and epoch >= holder.epoch
        if not is_first and not self.has_lease(holder):
            return LeaseReply(epoch, beat, store)
        info = msgspec.structs.replace(info, paused=known is not None and known.info.paused)
        self.put("lease", owner, StoredLease(info, until, epoch, beat + 1))
        held = self.held.get(owner, {}).values()
        renewal = Renewal(
            {row.id: row.token for row in held},
            frozenset(row.id for row in held if row.cancel_requested),
            info.paused,
        )
        return LeaseReply(epoch, beat + 1, store, renewal)

    def fence(self, owner: str, now: int, *, retires: bool) -> bool:
        """End an expired lease, or any lease if the owner itself retires; False if it is valid."""
        lease = self.leases.get(owner)
        if lease is not None and self._is_live(lease, now) and not retires:
            return False
        if lease is not None:
            self.put("lease", owner, None)
        if owner not in self.fenced:
            self.put("fenced", owner, StoredFence(now, 0 if lease is None else lease.beat))
        return True

    def _is_live(self, lease: StoredLease, now: int) -> bool:
        return lease.until > now and lease.epoch == self.epoch

    def pause_worker(self, owner: str, now: int, *, paused: bool) -> bool:
        """Set whether renewals say that the owner is paused; False when it has no valid lease."""
        lease = self.leases.get(owner)
        if lease is None or not self._is_live(lease, now):
            return False
        info = msgspec.structs.replace(lease.info, paused=paused)
        self.put("lease", owner, msgspec.structs.replace(lease, info=info))
        return True

    def list_leases(self, now: int) -> list[Lease]:
        """All leases in owner order, and the owners that hold tasks without one."""
        return [
            Lease(owner, lease.info, self._is_live(lease, now))
            if (lease := self.leases.get(owner)) is not None
            else Lease(owner, None, is_live=False)
            for owner in sorted(self.leases.keys() | self.held.keys())
        ]

    # Reading

    def record_of(self, task_id: str, now: int) -> Record | None:
        """What is stored under the id; a record past its `expires_at` is not."""
        row = self.rows.get(task_id)
        if row is not None:
            return Record(row)
        finished = self.finished.get(task_id)
        if finished is not None and finished.expires_at <= now:
            finished = None
        dead = self.dead.get(task_id)
        if dead is not None:
            return Record(dead.row, finished, dead.letter)
        return None if finished is None else Record(finished.row, finished)

    def page(self, query: Any, now: int) -> Any:
        """One page, as `Backend.page` describes it."""
        match query:
            case TaskQuery():
                return self.list_rows(query, now)
            case ScanQuery():
                return self.scan(query, now)
            case DeadQuery():
                return self.list_dead(query)
            case FinishedQuery():
                return self.list_finished(query)

    def list_rows(self, query: TaskQuery, now: int) -> list[Row]:
        """A page of rows, live and finished, in id order."""
        matching = (
            row for row in self._all_rows(now) if row.id > query.after and row_matches(row, query)
        )
        return heapq.nsmallest(query.limit, matching, key=attrgetter("id"))

    def scan(self, query: ScanQuery, now: int) -> Scan:
        """The matching rows, newest first, and where to continue."""
        begin = cursor_sequence(query.cursor)
        rows = sorted(self._all_rows(now), key=attrgetter("seq"), reverse=True)
        if begin is None and query.until is not None:
            rows = [row for row in rows if row.created_at < query.until]
        older = [row for row in rows if begin is None or row.seq < begin]
        found = [copy_of(row) for row in older[: query.max_scanned] if row_matches(row, query)]
        last = older[query.max_scanned - 1].seq if len(older) > query.max_scanned else None
        return scan_by_sequence(found[: query.limit + 1], query.limit, last)

    def _all_rows(self, now: int) -> Iterator[Row]:
        yield from self.rows.values()
        for finished in self.finished.values():
            if finished.expires_at > now:
                yield finished.row

    def list_dead(self, query: DeadQuery) -> list[StoredLetter]:
        """A page of dead letters, in id order."""
        letters = (
            stored.letter
            for task_id, stored in self.dead.items()
            if task_id > query.after and letter_matches(stored.letter, query)
        )
        return heapq.nsmallest(query.limit, letters, key=attrgetter("task_id"))

    def list_finished(self, query: FinishedQuery) -> list[str]:
        """The ids of records whose instant is at most that of the query."""
        by_expiry = query.by == "expires_at"
        return [
            task_id
            for task_id, each in self.finished.items()
            if (each.expires_at if by_expiry else each.finished_at) <= query.before
        ][: query.limit]

    def counts(self, now: int) -> Counts:
        """The number of tasks."""
        counts = Counts(now=now, by_status=dict.fromkeys(TaskStatus, 0), dead=len(self.dead))
        for row in self._all_rows(now):
            counts.add(row)
        counts.waiting = self.count_waiting()
        return counts

    def count_waiting(self) -> int:
        """The number of live tasks that do not run, without reading all rows."""
        held = (row for rows in self.held.values() for row in rows.values())
        return len(self.rows) - sum(row.status is TaskStatus.RUNNING for row in held)


class TablesSection(Section):
    """A section over tables that no other thread changes meanwhile."""

    def __init__(self, tables: Tables, now: int) -> None:
        self.now = now
        self._tables = tables

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        # The stored rows are those objects, until they are changed.
        rows = self._tables.rows
        return frozenset([row.id for row in known if rows.get(row.id) is row])

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        return {
            task_id: Record(copy_of(record.row), record.finished, record.letter)
            for task_id in ids
            if (record := self._tables.record_of(task_id, self.now)) is not None
        }

    async def live_token(self, task_id: str) -> int | None:
        row = self._tables.rows.get(task_id)
        return None if row is None else row.token

    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        return [
            copy_of(row)
            for owner in owners
            for row in self._tables.held.get(owner, {}).values()
            if row.crashes or not only_suspects
        ]

    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        self._tables.ready.promote(wanted.due_by)
        return list(map(copy_of, self._tables.ready.candidates(wanted, after, limit)))

    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        return [copy_of(row) for row in self._tables.ready.parked(keys, limit)]

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        stored = self._tables.documents[kind].by_key
        return {key: stored[key] for key in keys if key in stored}

    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        return self._tables.documents[query.kind].find(query)

    async def write(self, changes: Changes) -> frozenset[str]:
        self._tables.write(changes, self.now)
        return frozenset()
