"""The port between the engine and a store: what a backend implements, and nothing more.

The engine (`engine`) applies every rule. A backend finds rows, stores rows, and makes a set of changes
in one atomic step. It decides nothing about a task. A `Backend` is one connection to a store; a
`Section` is one atomic read-modify-write on it:

    async def work(section):
        found = await section.load(["a"])
        ...
        await section.write(Changes(updated=[...]))

    await backend.transact(work)

A store with transactions locks what a section reads. A store without them compares: `write` raises
`Moved` when something that the section has read was changed meanwhile, nothing is written, and the
engine runs the work again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeVar, overload

import msgspec

from omniq.clock import Clock
from omniq.concurrency.callers_lock import CallersLock
from omniq.errors import StorageError
from omniq.models import Runnable, StoredLetter, TaskStatus, WorkerInfo
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Capabilities, Claim, Holder, Identity, LeaseReply
from omniq.storage.types import Lease as Lease

_T = TypeVar("_T")

READY, SUSPECT, DELAYED, PARKED, HELD = range(5)
"""How a claim finds a live row: see `place_of`."""

POLLING_PAUSE = 0.1
"""Seconds between two polls for a result whose end is not notified, at most."""

Order = tuple[int, int, int]
"""A key that sorts rows in the order in which they are claimed: `Row.order`."""


def largest_value(max_payload: int) -> int:
    """Bytes of a stored value that is read, at most; of a larger one, only its size is.

    A body, a result, a checkpoint, a schedule or a report of progress that is larger is read as empty,
    and so is refused when it is decoded. Four payloads: a value may have a body, a result and errors.
    """
    return 4 * max(max_payload, 1 << 20)


def place_of(row: Row, now: int) -> int:
    """Where a claim finds the row.

    READY, or SUSPECT after a crash; DELAYED until it is visible; PARKED under a gate; HELD by an owner.
    """
    if row.owner is not None:
        return HELD
    if row.visible > now:
        return DELAYED
    if row.parked is not None:
        return PARKED
    return SUSPECT if row.crashes else READY


class Moved(Exception):
    """What a section has read was changed by others before its write. Nothing was written."""


class PerhapsWritten(Moved):
    """The reply to a write was lost. What was written is recognized when it is read again."""


class CommitUnknown(StorageError):
    """The connection was lost during a commit: it may have been made or not."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """Everything that is stored under a task's id.

    Of a task that has ended, `finished` is its record until its `result_ttl`, and `letter` its dead
    letter; `row` is then the row at its end. Of a live task both are None.
    """

    row: Row
    finished: FinishedRow | None = None
    letter: StoredLetter | None = None

    @property
    def is_live(self) -> bool:
        """Whether the task has not ended."""
        return self.finished is None and self.letter is None

    @property
    def newest_row(self) -> Row:
        """The row as the task's record has it; without one, as its dead letter has it."""
        return self.row if self.finished is None else self.finished.row


class Document(msgspec.Struct, frozen=True, gc=False):
    """A small value beside the rows: a checkpoint, a gate's state, a schedule, a held unique key.

    `due` is an instant, by which documents of a kind can be found; None if it is never searched for. That
    of the document `store` is the store's epoch, which a claim needs without decoding anything.
    """

    kind: str
    key: str
    data: bytes
    due: int | None = None


class DocumentQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which documents of a kind to find, in key order, or in order of `due` with `due_by`.

    `after` is the last key of the previous page, `due_after` the last `due` of it.
    """

    kind: str
    prefix: str = ""
    after: str = ""
    due_by: int | None = None
    due_after: int = -1
    limit: int = 1_000


ANY: Any = object()
"""In `DocumentChange.before`: whatever is stored is replaced."""


class DocumentChange(msgspec.Struct, frozen=True, gc=False):
    """A document to write or, with `after=None`, to delete.

    `before` is what must be stored now: the data that was read, None for nothing, or `ANY`. If it is
    not, the section has to run again; with `if_equal`, only this change is left out.
    """

    kind: str
    key: str
    before: bytes | None
    after: bytes | None
    due: int | None = None
    if_equal: bool = False


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A row that ends. Its record is stored if it has a `result_ttl`, the dead letter if there is one."""

    finished: FinishedRow
    letter: StoredLetter | None = None

    @property
    def row(self) -> Row:
        """The row in its final state."""
        return self.finished.row


class Changes(msgspec.Struct):
    """What one section writes, in one atomic step.

    `inserted`: new rows. Their ids are free (an expired record does not occupy its id, nor does one that is
    among `deleted_finished` or `deleted_dead`), and the store
    gives them the next `seq`, in order. `bound` is the number of waiting tasks that they may not exceed.
    `claimed`: rows to which `row_rules.claim` was applied, and nothing else.
    `updated`: other rows that stay live; `moved` are the ids of those of which only `parked` has changed,
    so that a store can write less, and `rewritten` those of which also the queue, the priority and the body
    may have changed. `ended`: rows that do not stay live.
    `checked`: rows that must not have changed, and are not written.
    `deleted_finished`, `deleted_dead`: ids of records and of dead letters to delete; of the records only
    those that finished before `finished_before`, if it is given, because an id may have been used again.
    """

    inserted: Sequence[Row] = ()
    bound: int | None = None
    claimed: list[Row] = []
    updated: list[Row] = []
    moved: set[str] = set()
    rewritten: Collection[str] = ()
    ended: list[Ended] = []
    checked: list[Row] = []
    documents: list[DocumentChange] = []
    deleted_finished: Sequence[str] = ()
    finished_before: int | None = None
    deleted_dead: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (
            self.inserted
            or self.claimed
            or self.updated
            or self.ended
            or self.documents
            or self.deleted_finished
            or self.deleted_dead
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which waiting rows a claim may take: due at `due_by`, from `queues` (None: all) but `paused`.

    `runnable`: the functions that the owner can run; None for all. `suspects`: whether suspects, which
    were held by a worker that died, are among them. `only_looks`: no owner waits for more of them.
    """

    due_by: int
    queues: tuple[str, ...] | None = None
    paused: frozenset[str] = frozenset()
    runnable: Runnable | None = None
    suspects: bool = True
    only_looks: bool = False

    def accepts(self, row: Row) -> bool:
        """Whether the claim may take the row, if it waits and is due."""
        return (
            (self.queues is None or row.queue in self.queues)
            and row.queue not in self.paused
            and (self.runnable is None or self.runnable.accepts(row.func_path))
            and (self.suspects or not row.crashes)
        )


class FinishedQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which records of ended tasks to find: those whose instant `by` is at most `before`.

    `after`: the last id of the previous page, which a backend that pages in id order may use.
    """

    by: Literal["finished_at", "expires_at"]
    before: int
    after: str = ""
    limit: int = 500


class Counts(msgspec.Struct):
    """The number of tasks, and for each queue the earliest `due` of a task that no owner holds.

    `waiting` are live tasks that do not run; `by_queue` are all live tasks.
    """

    now: int
    waiting: int = 0
    by_status: dict[TaskStatus, int] = {}
    by_queue: dict[str, int] = {}
    oldest: dict[str, int] = {}
    dead: int = 0

    def add(self, row: Row) -> None:
        """Count a task by its status, and a live one also by its queue."""
        self.by_status[row.status] += 1
        if not row.status.is_final:
            self.by_queue[row.queue] = self.by_queue.get(row.queue, 0) + 1
            if row.owner is None:
                self.oldest[row.queue] = min(row.due, self.oldest.get(row.queue, row.due))


class FastReply(msgspec.Struct, frozen=True):
    """What a fast path did. `missed`: ids whose outcomes are not recorded, because rows had changed.

    `rows` are the claimed rows, in claim order; None when nothing was claimed, because some outcomes were
    missed or because the claim needs the rules. `is_partial`: the rest of the claim needs them. `is_behind`:
    nothing was claimed, because the row of the claim's witness, or one that was enqueued later under its id,
    has a lower token. `is_repeated`: the reply to a first try was lost, which may have recorded the outcomes.
    """

    missed: frozenset[str] = frozenset()
    rows: list[Row] | None = None
    is_behind: bool = False
    is_partial: bool = False
    is_repeated: bool = False


class FastPath(Protocol):
    """Records planned outcomes and claims plain rows in one call. A backend may have one."""

    def now(self) -> int:
        """The store's time in microseconds, as far as it is known here."""
        ...

    async def record_and_claim(
        self, owner: str, changes: Changes, claim: Claim | None
    ) -> FastReply:
        """Write the changes of rows that this owner still holds, then claim.

        `changes` has `ended` and `updated` rows, planned from the rows as this owner claimed them. A row
        has moved when its owner or token differ, when it was cancelled, or when it is `attached`. The
        `documents` are deletions of unique keys; each is made with the ended row whose id is its data.
        Rows with gates that the backend's `gate_kinds` do not name are never among them.

        The claim takes rows without rules: if the first rows are not due, expired, suspects or gated, if a
        queue is paused or a gate is due, the reply has no rows, or only those before (`is_partial`), unless the
        backend can tell what the rules would do. `LeaseLost` if the owner has no lease and there is a claim.
        """
        ...


class Section(ABC):
    """One atomic read-modify-write. Rows that it returns are copies, which the engine may change."""

    now: int
    """The store's time in microseconds, read once."""

    epoch: int = 0
    """The store's epoch, in a section that claims."""

    claim_id: str = ""
    """The caller's id of a claim. A store that keeps it can answer a repeat of a call whose reply was lost."""

    async def begin(self, owner: str, known: Sequence[Row], claim: Claim | None) -> frozenset[str]:
        """Begin a step that records outcomes of `known` rows, and claims. Called before everything else.

        The rows are as this owner has claimed them. Returns the ids of those that have not changed: their
        owner and token are equal, and they are neither cancelled nor `attached`. The step reads only the
        others. A store may also compare them when it writes, and raise `Moved`: the step is then begun
        again without known rows.

        A store that pays for each round trip may read here what such a step asks for: the gates of the
        known rows, paused queues, gates that are due, suspects, and the first candidates with their gates.
        """
        return frozenset()

    @abstractmethod
    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        """Return what is stored under these ids; a record past its `expires_at` is not."""

    async def record(self, task_id: str, *, bodies: bool = False) -> Record | None:
        """Return what is stored under this id."""
        return (await self.load([task_id], bodies=bodies)).get(task_id)

    async def live_token(self, task_id: str) -> int | None:
        """Return the token of a live row, or None. Needed only where there is no fast path."""
        return None

    @abstractmethod
    async def held(self, owners: Sequence[str], *, only_suspects: bool = False) -> list[Row]:
        """Return the rows that these owners hold, or the suspects among them, without their bodies."""

    @abstractmethod
    async def candidates(self, wanted: Wanted, after: Order | None, limit: int) -> list[Row]:
        """Return the first waiting rows that `wanted` accepts, in claim order, behind `after`.

        Parked rows are not among them; rows past their `expires` are.
        """

    @abstractmethod
    async def parked(self, keys: Sequence[str], limit: int) -> list[Row]:
        """Return rows that are parked under these gates.

        Of each gate, queue and function, and of suspects and others apart, the first `limit` in claim
        order.
        """

    @abstractmethod
    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        """Return the documents with these keys."""

    async def document(self, kind: str, key: str) -> Document | None:
        """Return the document with this key."""
        return (await self.documents(kind, [key])).get(key)

    @abstractmethod
    async def find_documents(self, query: DocumentQuery) -> list[Document]:
        """Return the documents that the query describes."""

    @abstractmethod
    async def write(self, changes: Changes) -> frozenset[str]:
        """Make the changes, all of them or none. Called at most once, as the last step.

        Returns the ids of `claimed` rows that others took first, if the store can leave those out;
        no claimed row that has gates is ever left out. Raises `Moved` when anything else has changed,
        and `QueueFull` when the inserted rows exceed their bound.
        """


Work = Callable[[Section], Awaitable[_T]]


class Backend(ABC):
    """One connection to a store, for one storage object."""

    fast_path: FastPath | None = None
    gate_kinds: Collection[str] = ()
    """The kinds of gates that the fast path applies."""

    identity = Identity()
    """The owner that uses this backend. The storage replaces it."""

    callers_lock: CallersLock | None = None
    """Of a backend whose `transact` and `write` never suspend in a thread without an event loop."""

    store_clock: Clock | None = None
    """The clock of a store that has its own: see `store_clock`."""

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, so that a thread without an event loop waits for no other."""
        return False

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the store promises beyond the contract."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, creating missing tables, files or folders."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""

    @abstractmethod
    def sibling(self) -> Backend:
        """An unopened backend on the same store, with a separate connection."""

    @abstractmethod
    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        """Run `work` in one section, and return what it returns.

        `claims_as` names an owner that claims in it: `LeaseLost` if it has no lease, or if the store has
        another epoch than the owner knows (`identity.holder`). Without `writes` the section only reads.
        """

    async def write(self, changes: Changes) -> None:
        """Make changes that depend on nothing that is stored, in one section; `Moved` if they cannot be."""

        async def work(section: Section) -> None:
            await section.write(changes)

        await self.transact(work)

    @overload
    async def page(self, query: TaskQuery) -> list[Row]: ...
    @overload
    async def page(self, query: ScanQuery) -> Scan: ...
    @overload
    async def page(self, query: DeadQuery) -> list[StoredLetter]: ...
    @overload
    async def page(self, query: FinishedQuery) -> list[str]: ...
    @abstractmethod
    async def page(self, query: Any) -> Any:
        """Return one page of rows in id order, of rows newest first, of dead letters, or of ids."""

    @abstractmethod
    async def counts(self, *, only_waiting: bool = False) -> Counts:
        """Count the tasks; with `only_waiting`, only those that wait for a run need be counted."""

    @abstractmethod
    async def leases(self) -> list[Lease]:
        """Return all leases in owner order, and the owners that hold tasks without one.

        A lease of an earlier epoch is not live.
        """

    @abstractmethod
    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        """Extend a lease by `length` microseconds, and raise its beat.

        Refused if the owner was fenced, if its lease has a lower beat than the `holder`, or if the store has
        another epoch. Only the first renewal of an owner, which has the beat 0, creates a lease: with the
        store's epoch, unless that is lower than the holder's.
        """

    @abstractmethod
    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        """End an expired lease, or one of an earlier epoch, for good; False if it is valid.

        The owner can then neither renew nor claim, and the store knows its beat for a day at least.
        With `retires` the owner itself ends it, valid or not.
        """

    async def fence_overdue(self, lease: Lease) -> bool:
        """Fence the owner of a lease that is valid only because the store's clock was set back.

        False if it was renewed since it was read. For stores that fill `Lease.until`.
        """
        return False

    @abstractmethod
    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        """Set whether the owner's renewals say that it is paused; False when it has no valid lease."""

    @abstractmethod
    async def wait_for_work(self, timeout: float) -> None:
        """Return when there may be something to claim, or after `timeout` seconds."""

    async def read_clock(self) -> None:
        """Read the time of a store that has a clock, for `store_clock`."""
        return

    def watch_result(self, task_id: str) -> AbstractAsyncContextManager[float]:
        """While the context is open, the end of the task is notified to the local wake-ups, if it can be.

        Returns the seconds between two polls for the result, at most: more where it is notified.
        """
        return nullcontext(POLLING_PAUSE)

    # Only for stores whose capabilities have transactions

    async def end_transactions(self) -> None:
        """Roll back the transactions of tasks that are still open: the storage is being closed."""
        return

    async def transact_within(self, connection: object, work: Work[_T]) -> _T:
        """Run `work` in a section of the transaction that the caller has open on `connection`.

        When `work` raises, also `Moved`, what its section has written is undone, and nothing else. A
        connection of another kind, to another store, or in autocommit mode raises `InvalidTask`.
        """
        raise StorageError(f"the {self.capabilities.name} storage has no transactions")

    def transaction(
        self, finish: Callable[[], Work[None]], *, seconds: float, blocking: bool
    ) -> AbstractAsyncContextManager[Any]:
        """A connection in a transaction, which takes `seconds` at most.

        When the block ends, the work of `finish()` runs in a section of the transaction, which is then
        committed. With `blocking`, the connection is for another thread than the event loop's. Raises
        `CommitUnknown` when the reply to the commit is lost.
        """
        raise StorageError(f"the {self.capabilities.name} storage has no transactions")


def complete(work: Awaitable[_T]) -> _T:
    """Run a coroutine of a section that never waits, and return its result."""
    running = work.__await__()
    try:
        next(running)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise RuntimeError("a section waited for something outside of the store")
