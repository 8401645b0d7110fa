"""The storage contract: what every backend promises, and what is written once for all of them.

A storage has a backend, which stores rows, and an engine over it, which applies the rules to batches of
tasks. Everything a caller uses is here: the eight single-task verbs over those batches, validation
before anything is written, the owner's lease, and the claims that this object has made. Each numbered
promise is checked by a test of the same number in `omniq.testing.contract`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypedDict
from weakref import ReferenceType, ref

import msgspec

from omniq.clock import SYSTEM_CLOCK, Clock, from_micros, seconds_to_micros, to_micros
from omniq.concurrency.callers_lock import CallersLock
from omniq.concurrency.event_loop import has_event_loop
from omniq.concurrency.process_id import PROCESS_ID, OfOneProcess
from omniq.cron import next_run
from omniq.errors import (
    InvalidTask,
    InvalidValue,
    LeaseLost,
    SerializationError,
    StaleClaim,
    StorageError,
    StoreWentBack,
)
from omniq.failpoints import hit
from omniq.models import (
    Runnable,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
    WorkerInfo,
    check_id,
    check_instant,
    check_int,
    check_name,
    check_names,
)
from omniq.outcomes import (
    Cancelled,
    Failed,
    Outcome,
    Released,
    Rescheduled,
    Retried,
    Snoozed,
    Succeeded,
    Suspended,
)
from omniq.serialization import Serializer, serializer_for
from omniq.settings import Settings
from omniq.storage.backend import Backend, Lease
from omniq.storage.claim_register import ClaimRegister
from omniq.storage.engine import Engine
from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.flow_insertion import MAX_SOURCES, Under
from omniq.storage.flows import Flows
from omniq.storage.incarnation import StoreRecord
from omniq.storage.row_rules import Finish, Row, check_body, task_of
from omniq.storage.row_seals import row_seals
from omniq.storage.side_data import check_now
from omniq.storage.store_clock import is_rough, is_stale
from omniq.storage.types import Claim, EnqueueListener, GivenBack, Identity, Renewal
from omniq.storage.wakeups import LocalWakeups


class StorageOptions(TypedDict, total=False):
    """The options of every storage, whichever its backend. `max_pending` bounds the waiting tasks."""

    serializer: Serializer | None
    clock: Clock
    settings: Settings | None
    max_pending: int | None


class BaseStorage(OfOneProcess, Flows):
    """Stores tasks, gives each to one owner at a time, and records the outcomes.

    A storage object is an owner: it has an id that is fresh each time it is opened, one lease, and
    it remembers the claims it made.
    """

    _enqueue_writes = 0
    """Writes of concurrent enqueues that may be under way; 0 where joining the calls saves nothing."""

    _joined_ttl = 0
    """The shortest `result_ttl`, in microseconds, of tasks whose enqueue may be joined with others."""

    def __init__(
        self,
        *,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        if max_pending is not None:
            check_int("max_pending", max_pending, low=1, error=InvalidValue)
        self._settings = settings or Settings()
        self._default_ttl = seconds_to_micros(self._settings.result_ttl)
        self._serializer = serializer or serializer_for(self._settings)
        self._seals = row_seals(self._serializer)
        self._check_row = check_body if self._seals is None else self._seals.check_row
        self._clock = clock
        self._max_pending = self._settings.max_pending if max_pending is None else max_pending
        self._local_wakeups = LocalWakeups()
        self._enqueue_listeners: tuple[ReferenceType[EnqueueListener], ...] = ()
        self._identity = Identity()
        self._is_sibling = False
        self._is_open = False
        self._pid = 0
        self._forget_claims()

    def _forget_claims(self) -> None:
        self._register = ClaimRegister(self._identity)

    def _use(self, backend: Backend) -> None:
        """Store everything in that backend."""
        self._backend = backend
        # Of a store on a server it is the server's clock, unless the storage was given one.
        self._clock = backend.store_clock or self._clock
        self._engine = Engine(
            backend,
            self._serializer,
            self._encode_finish,
            self._max_pending,
            self._identity,
            self._clock,
        )

    # Opening and closing

    @property
    def is_open(self) -> bool:
        """Whether the storage may be used."""
        return self._is_open

    @property
    def owner(self) -> str:
        """The id under which this object claims; fresh at every opening and after every fencing."""
        return self._identity.owner

    @property
    def claims(self) -> dict[str, int]:
        """The claims that this object made and has not ended by an outcome: task id to token."""
        return self._register.claims

    @property
    def register(self) -> ClaimRegister:
        """Which of its claims this object's pools and callers have."""
        return self._register

    @property
    def clock(self) -> Clock:
        """The store's clock: the server's or this machine's, or the one this storage was given."""
        return self._clock

    @property
    def serializer(self) -> Serializer:
        """The serializer of this storage's tasks and results."""
        return self._serializer

    @property
    def max_pending(self) -> int | None:
        """How many tasks may wait; None when there is no bound."""
        return self._max_pending

    @property
    def settings(self) -> Settings:
        """The settings this storage was given."""
        return self._settings

    @property
    def callers_lock(self) -> CallersLock | None:
        """Held by a thread that runs an enqueue without an event loop; None if no thread can."""
        return self._backend.callers_lock

    @property
    def is_idle(self) -> bool:
        """Whether a thread may run an enqueue without an event loop: no other call uses the backend now.

        Not in a process that was forked, nor beside a worker of this object, which counts what is enqueued.
        """
        return (
            self._is_open
            and self._backend.is_idle
            and self._pid == PROCESS_ID.number
            and not any(reference() is not None for reference in self._enqueue_listeners)
        )

    async def open(self) -> None:
        """Make the storage ready for use, creating missing tables, files or folders.

        O1. Using a storage that is not open raises `StorageClosed`.
        O2. Every opening is a new owner; claims of an earlier opening are not adopted.
        """
        self._pid = os.getpid()
        await self._backend.open()
        try:
            # The first reply may have been slow: it took a connection, or even an installation.
            for _ in range(_READINGS):
                if is_rough(self._clock):
                    await self._backend.read_clock()
        except StorageError:
            pass
        except BaseException:
            # When this call is cancelled, the storage is not open, and no later call would close it.
            await self._backend.close()
            raise
        # With a limit, one write at a time: the first call gets the room that is left.
        writes = self._enqueue_writes if self._max_pending is None else 1
        self._batcher = EnqueueBatcher(self._insert, concurrent_writes=writes)
        self._replacing = asyncio.Lock()
        # The random part of an id.
        self._nonce_prefix, self._nonces = self._clock.new_id()[10:], itertools.count()
        if not self._is_sibling:
            self._identity.start(self._clock.new_id(), self._clock.micros())
        self._is_open = True

    async def close(self) -> None:
        """Stop using the storage. May be called twice.

        O3. The tasks that this owner still holds are given back immediately, and charged nothing.
        """
        if not self._is_open:
            return
        if self._pid != os.getpid():
            # After a fork the connections and claims are the parent's: neither is touched.
            self._is_open = False
            self._register.clear()
            return
        try:
            # Before any other write, because an open transaction may block all writers.
            await self._backend.end_transactions()
            if not self._is_sibling and self._identity.lease_until:
                await self._engine.retire(self.owner)
        finally:
            self._is_open = False
            self._register.clear()
            await self._backend.close()
            self._local_wakeups.notify_work()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def retire(self) -> None:
        """Give back the tasks that this owner still holds, charged nothing, and end its lease.

        It is no longer among the `workers`. This object's next claim is made by a fresh owner.
        """
        self._check_open()
        owner = self.owner
        if self._identity.lease_until:
            await self._engine.retire(owner)
            self._change_owner(owner)

    def sibling(self) -> Self:
        """An unopened object on the same store that acts as the same owner.

        O4. For a heartbeat: it renews this owner's lease from another thread or event loop, over
            a separate connection, and closing it gives nothing back.
        """
        sibling = object.__new__(type(self))
        vars(sibling).update(vars(self))
        sibling._is_sibling = True
        sibling._is_open = False
        sibling._forget_claims()
        sibling._use(self._backend.sibling())
        return sibling

    # Enqueue

    async def enqueue(self, task: Task) -> str:
        """Store the task; returns its id, or that of the task that holds its `unique` key.

        E1. When it returns, the task is stored as durably as `capabilities` says.
        E2. An id that has a record raises `DuplicateTask`.
        E3. A `unique` key that is held returns the id of the task that holds it; nothing is added.
            The key is held while that task is PENDING, RUNNING or RETRYING.
        E4. Bad values raise `InvalidTask` and nothing is written, on every backend alike.
        E5. With `max_pending` waiting tasks, `QueueFull` is raised and nothing is written.
        E6. The task that a claim returns equals the task that was enqueued.
        E10. Tasks with one `sequence` run one at a time, in the order of their enqueue, whatever their priority,
            eta, retries and sleeps. The step that ends one makes the next one claimable, whichever waiting
            ones have ended in between; a dead letter of a task that `halts` holds the others.
        E11. With `on_conflict="replace"`, a holder that waits takes the arguments, the metadata and the eta of
             the call, and begins again if it had failed. If it runs, the new task holds the key from then on, and
             waits for its end: at most one runs and one waits, and the newest arguments always run.
        E12. With `on_conflict="extend"`, a holder that waits keeps its arguments and takes the eta. No call
             delays a holder beyond `max_wait` seconds after the first.
        E13. With `unique_for`, the key is held for that many seconds from the enqueue, also after the end.
        E14. The conflicts of a batch are settled in its order.
        """
        return (await self.enqueue_many((task,)))[0]

    async def enqueue_many(
        self,
        tasks: Iterable[Task],
        *,
        nonce: str | None = None,
        under: tuple[str, int] | None = None,
    ) -> list[str]:
        """Store many tasks with few round trips and one durability barrier; returns their ids, in order.

        `under` is the id and the token of a claim of this owner: nothing is stored unless it is current.

        E7. Refused as a whole: if one is bad, taken, or too many, none is written.
        E8. A second call with the same `nonce` repeats a call whose reply was lost: tasks that the
            first call enqueued count as done. Without a nonce, every call is a new one.
        E9. The order of a batch holds: tasks of equal priority and eta are claimed in it.
        """
        self._check_open()
        if is_stale(self._clock):
            # A producer that only enqueues receives no other reply with the store's time.
            with suppress(StorageError):
                await self._backend.read_clock()
        hit("enqueue.before")
        claim = None if under is None else Under(self.owner, *under)
        enqueued = await self._enqueue(self._rows_for(tasks, nonce), claim)
        hit("enqueue.after")
        if enqueued:
            self._local_wakeups.notify_work()
        return enqueued

    async def enqueue_within(
        self, connection: object, tasks: Iterable[Task], *, nonce: str | None = None
    ) -> list[str]:
        """`enqueue_many` as a part of the transaction that the caller has open on `connection`.

        N1. The tasks exist once the caller commits, and never existed if the caller rolls back.
        N2. What `enqueue_many` refuses is refused, and the transaction stays usable as it was. Tasks of other
            transactions that are still open do not count against `max_pending`.
        N3. A connection of another kind, to another store, or in autocommit mode, raises
            `InvalidTask`; so does a backend whose `capabilities` have no transactions.
        """
        self._check_transactions()
        rows = list(self._rows_for(tasks, nonce))
        return await self._engine.enqueue(rows, within=connection) if rows else []

    # Claim

    async def dequeue(self, now: datetime) -> Task | None:
        """Claim one task that is due at `now`: `reserve` of one."""
        claimed = await self.reserve(1, now)
        return claimed[0] if claimed else None

    async def reserve(
        self,
        limit: int,
        now: datetime | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
        runnable: Runnable | None = None,
    ) -> list[Task]:
        """Claim up to `limit` due tasks for this owner, in one round trip.

        C1. A claimed task is RUNNING, has this owner, and a token one above its last.
        C2. No task is claimed by two owners, however many claim at the same time.
        C3. Nothing is claimed before its eta. `now` decides what is due; None is the store's clock.
        C4. Order: priority descending, then eta ascending, then order of enqueue. C13 and C16 say which tasks have
            another turn than their eta.
        C5. A claimed task is not claimed again until it is released, rescheduled, or given back.
        C6. `queues` restricts the claim; nothing is claimed from a paused queue.
        C7. A repeat with the same `claim_id` returns the tasks of the first call that still run.
        C8. A task past its `expires` is not claimed: it ends as CANCELLED.
        C9. A task whose record cannot be decoded becomes a dead letter, and blocks no other task.
        C10. An owner holds at most one suspect (a task that a worker held when it died).
        C11. An owner that was fenced is refused with `LeaseLost`, and has a fresh id afterwards.
        C12. A claim is valid as long as the owner's lease; claiming takes a lease when there is none.
        C13. The keys of the tasks with a `fair` key in one queue and priority take turns, and the tasks of a key
             run in the order in which they came to wait: at their enqueue, or when they became due. One that was
             released keeps its turn, one that is retried takes another.
        C14. Of keys that have tasks waiting throughout, what they have started, as cost by weight, differs by no
             more than a task, and one more for each producer that enqueued at the same moment, and for each
             task that a worker has released. Tasks that are cancelled while they wait are not charged.
        C15. A key that had nothing waiting begins within one round, and is stored only while it says something.
        C16. With `ageing`, a task waits for later ones of higher priority for no longer than the difference times
             that span.
        C17. A claim takes only tasks of functions that `runnable` accepts (None: all); all others
            wait, uncharged, and cost it nothing.
        C18. A row with a lower token than this owner was given for it shows that the store went back, to a
            claim and to an outcome: `StoreWentBack`. So does a missing row of a task that this owner holds,
            to its outcome. No token is given to one owner twice.
        """
        _, claimed = await self.record_and_reserve(
            (), limit, now, queues=queues, claim_id=claim_id, runnable=runnable
        )
        return claimed

    async def record_and_reserve(
        self,
        outcomes: Sequence[Outcome],
        limit: int,
        now: datetime | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
        runnable: Runnable | None = None,
    ) -> tuple[list[bool], list[Task]]:
        """`record` and then `reserve`, in one step and one round trip.

        R9. The effect is the same as calling one after the other.

        At its claim, a task with gates enters them, or is parked under the key of the gate that blocks
        it; it leaves them with its outcome.

        G2. No more tasks with one running-limit key are held by live claims than it allows.
        G3. No more tasks with one rate key are claimed within any span than it allows.
        G4. While a breaker is open its tasks are not claimed; then one probe at a time is.
        G5. A parked task keeps its position in the order, and holds up other tasks only as G15 says.
        G6. A claim does not cost more because keys are blocked, or because many have room at the same time.
        G7. What has room is offered in order, and a task that cannot be taken keeps no other out: one of another
             queue or function than the claim asks for, or one that another gate blocks. G15 says what holds for one
             that only needs more units of this limit than are free.
        G8. The state of a limit that says nothing is deleted, and that changes nothing.
        G11. No more units than a limit allows are held by live claims, or started within any span. A task that
             costs more than the whole limit runs alone.
        G15. What is free is saved for a task that needs more, for 10 seconds after the last claim that would
             have taken it. So tasks behind it in line do not pass it for ever, and one that no claim would
             take keeps no other out for longer.
        """
        self._check_open()
        if self._register.has_completed and any(map(self._is_completed, outcomes)):
            completed = [self._is_completed(each) for each in outcomes]
            rest = [each for each, is_done in zip(outcomes, completed, strict=True) if not is_done]
            recorded, tasks = await self.record_and_reserve(
                rest, limit, now, queues=queues, claim_id=claim_id, runnable=runnable
            )
            for outcome, is_done in zip(outcomes, completed, strict=True):
                if is_done:
                    self._register.drop_completed(outcome)
            answers = iter(recorded)
            return [is_done or next(answers) for is_done in completed], tasks
        if claim_id is not None and not outcomes:
            known = await self._claimed_as(claim_id)
            if known:
                return [], known
        # Workers encode the result of a success themselves, and then there is nothing to check.
        outcomes = [
            each if type(each) is Succeeded and each.encoded is not None else self._encoded(each)
            for each in outcomes
        ]
        claim = self._claim_request(limit, now, queues, claim_id, runnable)
        if self._identity.claims_from > self._clock.boot_micros():
            # Two servers seem to answer at one address.
            claim = None
        if claim is not None:
            await self._ensure_lease()
        if claim is None and not outcomes:
            return [], []
        owner = self.owner
        hit("record_and_claim.before")
        with nullcontext() if claim is None else self._register.claiming():
            try:
                recorded, claimed = await self._engine.record_and_claim(owner, outcomes, claim)
            except LeaseLost as lost:
                await self._after_refusal(lost)
                raise
            hit("record_and_claim.after")
            if claimed.expired:
                self._local_wakeups.notify_results(claimed.expired)
            if claimed.has_released:
                self._local_wakeups.notify_work()
            self._forget(outcomes, recorded)
            if claim is None or owner != self.owner:
                # A sibling was fenced meanwhile: what was claimed has been given back with the rest.
                return recorded, []
            return recorded, await self._remember(claimed.rows, claim)

    # Record

    async def record(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """Record the outcomes of runs, in one round trip; returns for each whether it was recorded.

        R1. Each outcome is recorded in one atomic step, or not at all.
        R2. An outcome whose claim is no longer the current one changes nothing and returns False.
        R3. Repeating an outcome that was recorded returns True and changes nothing.
        R4. A failed run adds one to `attempts` and its error to the history; nothing else adds to
            `attempts`, and only a crash adds to the history.
        R5. A finished task has its result until its `result_ttl`, and frees its unique key in the
            same step.
        R6. A final failure becomes a dead letter in the same step.
        R7. `Released` and `Snoozed` charge nothing.
        R8. A task that was cancelled while it ran does not run again.
        R10. A failure with the reason `crashed` counts as a crash, and says nothing to its breakers.
        R11. A failed run has ended at the timestamp of its error, however late it is recorded: never before
            its start, nor after it was recorded.
        R12. After a failure with `next_eta` a repeating task is PENDING for that time, without failures
            and not a dead letter; the failure is its newest result and stays in its history until a
            run succeeds.
        R13. The next `occurrence` of a repeating task has a higher number, and no other outcome and no
            lost worker changes it.
        """
        recorded, _ = await self.record_and_reserve(outcomes, 0)
        return recorded

    async def mark_running(self, task_id: str) -> None:
        """Report that a claimed task starts now. No correctness depends on it.

        M1. Raises `StaleClaim` when this object holds no claim on the task, as the others do.
        """
        self._claim_on(task_id)

    async def mark_done(self, task_id: str, result: TaskResult) -> None:
        """Record the success of this object's claim on the task.

        M2. A repeating task is PENDING again for its next run, with attempts 0.
        """
        task = self._claim_on(task_id)
        if result.status is not TaskStatus.SUCCESS or result.task_id != task_id:
            raise InvalidTask(
                f"task {task_id}: mark_done takes a result of this task, with status SUCCESS"
            )
        now = self._clock.now()
        complete = msgspec.structs.replace(
            result,
            attempts=result.attempts or task.attempts + task.crashes + 1,
            started_at=result.started_at or task.started_at,
            finished_at=result.finished_at or now,
        )
        again = next_run(interval=task.interval, cron=task.cron, tz=task.tz, after=now)
        await self._record_one(Succeeded(task_id, task.token, complete, again))
        if again is not None:
            self._register.repeated[task_id] = task.token

    async def mark_failed(self, task_id: str, error: TaskError, will_retry: bool) -> None:
        """Record the failure of this object's claim on the task.

        M3. `will_retry=True`: RETRYING, attempts one more, still held and not claimable until
            `reschedule`. The storage itself reschedules nothing.
        M4. `will_retry=False`: FAILED, with the error stored.
        """
        task = self._claim_on(task_id)
        if error.timestamp is None:
            error = TaskError(**{**error.to_record(), "timestamp": self._clock.now()})
        if will_retry:
            await self._record_one(Retried(task_id, task.token, error))
        else:
            await self._record_one(Failed(task_id, task.token, error))

    async def reschedule(self, task_id: str, new_eta: datetime) -> None:
        """Release a claimed task; it is claimable again at `new_eta`, under the same id.

        M5. Accepts a task that this object holds, and a repeating task that it has just finished.
        """
        check_now("new_eta", new_eta)
        register = self._register
        token = register.repeated.get(task_id) if task_id not in register.claims else None
        if token is None:
            token = self._claim_on(task_id).token
        await self._record_one(Rescheduled(task_id, token, new_eta))
        register.repeated.pop(task_id, None)

    @asynccontextmanager
    async def transaction(
        self, task_id: str, token: int, success: Callable[[], Succeeded], *, blocking: bool = False
    ) -> AsyncIterator[Any]:
        """A connection to the same database, whose commit also records the claim's success.

        `success` is called when the block ends. With `blocking`, the connection is for another
        thread than the event loop's; else it is used on the loop.

        N4. Leaving the block commits what was written through the connection and the outcome, in
            one step; an exception rolls back both, and the claim stays as it was.
        N5. When the claim is no longer the current one, nothing is committed: `StaleClaim`.
        N6. Any outcome of this claim that is recorded afterwards counts as a repeat, and changes
            nothing.
        """
        self._check_transactions()
        check_id(task_id)
        outcomes: list[Outcome] = []

        def outcome() -> Outcome:
            outcomes.append(self._encoded(success()))
            hit("transaction.before")
            return outcomes[-1]

        # Short enough that the lease is renewed meanwhile.
        seconds = (self._identity.lease or self._settings.lease) / 3
        with self._register.in_transaction(task_id, token):
            async with self._engine.transaction(
                self.owner, outcome, seconds=seconds, blocking=blocking
            ) as connection:
                yield connection
            hit("transaction.after")
        self._notify_recorded(outcomes[-1:])

    # Cancel

    async def cancel(self, task_id: str, reason: str = "by request") -> bool:
        """Store that the task is cancelled, and all below it; returns False when it has ended already.

        X1. A waiting task ends as CANCELLED immediately and never runs.
        X2. A running task's owner is notified at its next renewal; the task does not run again.
        X3. A task that has ended, or has no record, is not touched.
        """
        check_id(task_id)
        cancelled = await self._opened.cancel(task_id, reason)
        if cancelled:
            self._local_wakeups.notify_results((task_id,))
            self._local_wakeups.notify_cancelled(task_id)
        return cancelled

    def on_enqueue(self, listener: EnqueueListener) -> None:
        """Pass the listener the rows that later enqueues of this object add, as long as it exists.

        Enqueues within a transaction are not reported: whether they happen is up to the caller.
        """
        known = (reference for reference in self._enqueue_listeners if reference() is not None)
        self._enqueue_listeners = (*known, ref(listener))

    def on_cancel(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with the id of each task that is cancelled through this object.

        Returns a function that stops the calls.
        """
        return self._local_wakeups.on_cancel(listener)

    # Leases and recovery

    @property
    def lease_remaining(self) -> float:
        """Seconds for which this owner certainly has the lease; 0 or less when it may have expired."""
        return (self._identity.lease_until - self._clock.boot_micros()) / 1_000_000

    async def renew(
        self,
        *,
        lease: float | None = None,
        concurrency: int = 0,
        queues: Sequence[str] = (),
        stalled: bool = False,
        stopping: bool = False,
        runnable: Runnable | None = None,
        runs: tuple[int, int, int] = (0, 0, 0),
    ) -> Renewal:
        """Extend this owner's lease by `lease` seconds, with one write.

        Without `lease`: by the same length as the last renewal, or by that of the settings. The other
        arguments are what `workers` shows of this owner; `runs` are those that succeeded, failed, and are retried.

        L1. While its lease is valid, nothing an owner holds is given to another owner.
        L2. Renewing is idempotent: a lost reply does no harm.
        L3. A fenced owner is refused with `LeaseLost`, and has a fresh id afterwards.
        L4. It returns which tasks this owner holds in the store, and which of them were cancelled.
        L5. `workers` lists a worker with a lease, with the tasks it holds, and none without.
        L14. A store that went back to an earlier state is noticed by an owner that meets a lower epoch, a
            lower beat of its lease, or no trace of it: `StoreWentBack`, and the epoch is raised.
        L15. An owner that meets a higher epoch is fenced, and adopts it.
        L16. A store that needs a newer omniq is refused with `StorageRefused`, also when it is opened.
        L19. When the epoch is raised a second time within one lease, claims wait for one lease: two servers
            seem to answer at one address.
        """
        self._check_open()
        self._identity.lease = lease or self._identity.lease or self._settings.lease
        length = seconds_to_micros(self._identity.lease)
        requested_at = self._clock.boot_micros()
        info = WorkerInfo(
            id=self.owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=from_micros(self._identity.started_at),
            last_heartbeat=self._clock.now(),
            stalled=stalled,
            stopping=stopping,
            concurrency=concurrency,
            queues=tuple(queues),
            runnable=runnable,
            succeeded=runs[0],
            failed=runs[1],
            retried=runs[2],
        )
        hit("renew.before")
        try:
            renewal = await self._engine.renew(info, length)
        except LeaseLost as lost:
            self._change_owner(lost.owner)
            raise
        hit("renew.after")
        # Counted from before the request: the store cannot have started the lease any earlier.
        self._identity.trust(info.id, requested_at + length)
        return renewal

    async def give_back_abandoned(
        self,
        max_crashes: int | None = None,
        *,
        why_ended: Callable[[Lease], str | None] | None = None,
    ) -> list[GivenBack]:
        """Take their tasks from owners without a valid lease; returns what was taken.

        `why_ended` is asked about each lease, by a pool that knows more than the store's clock: it says
        why the owner has lost it, or returns None if the owner still has it.

        L6. The owner is fenced first: it can neither renew nor claim nor record afterwards.
        L7. A task is due again immediately, charged one crash and no failure.
        L8. When the owner held a suspect, only that one is charged.
        L9. A task charged `max_crashes` times becomes a dead letter with the reason `crashed`. A task
            may have its own maximum.
        L10. A RETRYING task that was still held is given back without a further charge.
        L11. An unknown owner counts as one without a lease.
        L12. Two concurrent calls take each task once.
        L13. A task whose own maximum is 0 or 1 runs at most once: when its owner is lost, charged or
            not, or gives up its lease while it holds the task, it becomes a dead letter.
        L17. Claims from before the store's epoch was raised are given back immediately, charged nothing; a
            task of L13 becomes a dead letter with the reason `store went back`.
        """
        self._check_open()
        limit = self._settings.max_crashes if max_crashes is None else max_crashes
        check_int("max_crashes", limit, low=1, error=InvalidValue)
        hit("recover.before")
        given_back = await self._engine.give_back(limit, why_ended)
        hit("recover.after")
        if given_back:
            self._local_wakeups.notify_work()
            self._local_wakeups.notify_results([back.task_id for back in given_back])
        return given_back

    async def mark_restored(self) -> int:
        """Raise the store's epoch after it was restored from a backup; returns it.

        L18. All owners are fenced, what they hold is given back as in L17, and later claims have higher
            tokens than all earlier ones, also than those that the store has forgotten.
        """
        return await self._opened.restored()

    async def count_newer(self, limit: int = 1_000) -> int:
        """The number of tasks that only a newer omniq can run, among the first that wait.

        C19. A claim leaves a task whose record has a newer format than this omniq reads, and no newer one
            than the store has; it waits, uncharged. One above the store's format is damaged: see C9.
        """
        return await self._opened.count_newer(limit)

    async def store_record(self) -> StoreRecord:
        """What the store says of itself: its id, its epoch, and the format of its records."""
        return await self._opened.store_record()

    # Waiting

    async def wait_for_work(self, timeout: float) -> None:
        """Return when there may be something to claim, or after `timeout` seconds.

        W1. An enqueue through this object ends the wait immediately.
        W2. Only a hint: a return promises nothing, and with every wake-up lost, polling still works.
        """
        self._check_open()
        await self._backend.wait_for_work(timeout)

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        """Wait for the final result; returns None after `timeout`, or if the task has no record.

        W3. A result that is not final is never returned.
        W4. An outcome recorded through this object ends the wait immediately.
        """
        self._check_open()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        pause = _FIRST_PAUSE
        async with self._backend.watch_result(task_id) as longest_pause:
            while True:
                with self._local_wakeups.listen_for_result(task_id) as ended:
                    result = await self.get_result(task_id)
                    if result is not None and result.status.is_final:
                        return result
                    if result is None and await self.get_task(task_id) is None:
                        return None
                    remaining = None if deadline is None else deadline - self._clock.monotonic()
                    if remaining is not None and remaining <= 0:
                        return None
                    seconds = pause if remaining is None else min(pause, remaining)
                    await self._clock.wait(ended, seconds)
                pause = min(pause * 1.5, longest_pause)

    def _check_transactions(self) -> None:
        self._check_open()
        if not self.capabilities.transactions:
            raise InvalidTask(
                f"the {self.capabilities.name} storage has no transactions; "
                "those of sqlite:// and postgresql:// have"
            )

    async def _enqueue(self, rows: Iterator[Row], under: Under | None) -> list[str]:
        """Insert rows as they are made, together with those of concurrent calls where that saves work."""
        made = list(rows)
        if not made:
            return []
        if (
            self._enqueue_writes
            and has_event_loop()
            and all(row.result_ttl >= self._joined_ttl and row.workflow is None for row in made)
        ):
            ids = await self._batcher.add(made)
        else:
            ids = await self._insert_by_rules(made, under)
        if self._enqueue_listeners:
            self._report_enqueued(made, ids)
        return ids

    def _report_enqueued(self, rows: Sequence[Row], ids: Sequence[str]) -> None:
        # The id of another row: that one holds the unique key, and this row was not added.
        added = [row for row, task_id in zip(rows, ids, strict=True) if row.id == task_id]
        for reference in self._enqueue_listeners:
            if added and (listener := reference()) is not None:
                listener.enqueued(added)

    async def _insert(self, rows: list[Row]) -> list[str]:
        """Insert the rows of one or more calls."""
        return await self._insert_by_rules(rows)

    async def _insert_by_rules(self, rows: list[Row], under: Under | None = None) -> list[str]:
        if has_event_loop() and any(row.on_conflict for row in rows):
            # In the order of the calls: a step that is begun again would replace what a later call has stored.
            async with self._replacing:
                return await self._engine.enqueue(rows, under=under)
        return await self._engine.enqueue(rows, under=under)

    def _encoded(self, outcome: Outcome) -> Outcome:
        """The outcome, checked, with its result encoded if it has one."""
        match outcome:
            case Succeeded():
                if outcome.encoded is None:
                    encoded = self._serializer.encode_result(outcome.result)
                    return msgspec.structs.replace(outcome, encoded=encoded)
            case Retried() | Released():
                check_instant("eta", outcome.eta)
            case Snoozed() | Rescheduled():
                check_now("eta", outcome.eta)
            case Failed():
                check_instant("next_eta", outcome.next_eta)
            case Suspended():
                _check_suspension(outcome)
            case Cancelled():
                pass
        return outcome

    def _encode_finish(self, finish: Finish) -> bytes:
        """Encode the result of a task that has ended."""
        try:
            return self._serializer.encode_result(finish.result)
        except SerializationError:
            # The text of an error is bounded, but max_payload may be even smaller.
            error = finish.result.error
            short_error = (
                TaskError(error.message[:64], error_type=error.error_type[:64]) if error else None
            )
            return self._serializer.encode_result(
                msgspec.structs.replace(finish.result, error=short_error, reason=None, warnings=())
            )

    def _claim_request(
        self,
        limit: int,
        now: datetime | None,
        queues: Sequence[str] | None,
        claim_id: str | None,
        runnable: Runnable | None,
    ) -> Claim | None:
        check_int("limit", limit, low=0, error=InvalidValue)
        check_instant("now", now)
        check_names("queues", queues)
        for queue in queues or ():
            check_name("queue", queue, error=InvalidValue)
        if limit == 0:
            return None
        return Claim(
            limit=limit,
            now=None if now is None else to_micros(now),
            queues=None if queues is None else tuple(dict.fromkeys(queues)),
            claim_id=claim_id or "",
            runnable=runnable,
        )

    async def _claimed_as(self, claim_id: str) -> list[Task]:
        """The tasks that an earlier call with that id claimed and that this owner still holds."""
        known = self._register.claimed_as(claim_id)
        if not known:
            return []
        held = await self.held_by(self.owner)
        return [task for task in known if held.get(task.id) == task.token]

    async def _ensure_lease(self) -> None:
        # A pool's heartbeat renews the lease; this is for callers that claim without a pool.
        if self.lease_remaining <= self._identity.lease / 3:
            await self.renew()

    async def _after_refusal(self, lost: LeaseLost) -> None:
        """Become a fresh owner, after a refused claim.

        A renewal, which is refused as well, shows whether the owner was fenced or the store went back.
        """
        if lost.owner == self.owner and not isinstance(lost, StoreWentBack):
            with suppress(StorageError):
                await self.renew()
        self._change_owner(lost.owner)

    def _change_owner(self, fenced: str) -> None:
        self._identity.replace(fenced, self._clock.new_id(), self._clock.micros())

    async def _remember(self, rows: list[Row], claim: Claim) -> list[Task]:
        tasks: list[Task] = []
        refused: list[Outcome] = []
        seals = self._seals
        for row in rows:
            try:
                enqueued = self._decoded(row)
                task = task_of(row, enqueued)
            except SerializationError as error:
                record = TaskError.from_exception(error, timestamp=self._clock.now())
                refused.append(Failed(row.id, row.token, record, "undecodable"))
                continue
            if seals is not None and seals.is_early(row, enqueued, claim.now):
                refused.append(Released(row.id, row.token, eta=enqueued.eta))
                continue
            tasks.append(task)
        if refused:
            # If that fails, the other claims are valid all the same; this one is released as unknown.
            with suppress(StorageError):
                await self.record(refused)
        # Last: a caller that is cancelled before this gets no task, so all of them are unknown here.
        self._register.add(tasks, claim.claim_id)
        return tasks

    def _forget(self, outcomes: Sequence[Outcome], recorded: list[bool]) -> None:
        if not outcomes:
            return
        ended = outcomes
        if Retried in set(map(type, outcomes)):
            # A task that is to be rescheduled by its caller is still claimed.
            ended = [
                outcome
                for outcome, was_recorded in zip(outcomes, recorded, strict=True)
                if not (isinstance(outcome, Retried) and outcome.eta is None and was_recorded)
            ]
        self._register.drop(ended)
        self._notify_recorded(outcomes)

    def _notify_recorded(self, outcomes: Sequence[Outcome]) -> None:
        self._local_wakeups.notify_results([outcome.task_id for outcome in outcomes])
        ended = [
            outcome
            for outcome in outcomes
            if (isinstance(outcome, _MAY_END) and outcome.next_eta is None)
            or isinstance(outcome, Cancelled)
        ]
        if len(ended) < len(outcomes):
            # The others will run again.
            self._local_wakeups.notify_work()

    def _is_completed(self, outcome: Outcome) -> bool:
        return self._register.is_completed(outcome.task_id, outcome.token)

    def _claim_on(self, task_id: str) -> Task:
        self._check_open()
        check_id(task_id)
        task = self._register.task(task_id)
        if task is None:
            raise StaleClaim(task_id)
        return task

    async def _record_one(self, outcome: Outcome) -> None:
        (recorded,) = await self.record((outcome,))
        if not recorded:
            raise StaleClaim(outcome.task_id, outcome.token)


def _check_suspension(outcome: Suspended) -> None:
    check_instant("until", outcome.until)
    count, enough = len(outcome.on), outcome.enough
    if count > MAX_SOURCES:
        raise InvalidTask(
            f"task {outcome.task_id}: it waits for {count:,} records; {MAX_SOURCES:,} is the maximum"
        )
    if enough is not None and not 1 <= enough <= count:
        raise InvalidTask(
            f"task {outcome.task_id}: enough={enough} of {count} records: expected a number from 1 to {count}"
        )


_MAY_END = (Succeeded, Failed)
"""The outcomes that end a task unless they have a `next_eta`. As a constant: a union is made for each check."""

_FIRST_PAUSE = 0.002
_READINGS = 3
"""How often the store's clock is read at most, until its time is known well."""
