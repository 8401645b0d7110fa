"""The engine: every rule about tasks, applied once, over any backend.

Each verb is one atomic step: it reads rows and documents in a section of the backend, applies the rules
of `row_rules` and `gate_rules`, and writes the changes. When the backend says that what was read has
changed meanwhile (`Moved`), the step begins again.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar

import msgspec

from omniq import signing
from omniq.clock import Clock, seconds_to_micros, to_micros
from omniq.errors import (
    DuplicateTask,
    InvalidValue,
    LeaseLost,
    QueueFull,
    SerializationError,
    StaleClaim,
    StorageError,
    StoreWentBack,
)
from omniq.gate_rules import GateState
from omniq.models import (
    MAX_MISSED,
    DeadLetter,
    Progress,
    QueueStats,
    Runnable,
    Schedule,
    TaskStatus,
    WorkerInfo,
    check_stored_schedule,
)
from omniq.outcomes import Outcome, Released
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.signing import open_document, seal_document, unsealed
from omniq.storage import row_rules
from omniq.storage.backend import (
    ANY,
    Backend,
    Changes,
    CommitUnknown,
    Document,
    DocumentChange,
    DocumentQuery,
    FastPath,
    FinishedQuery,
    Lease,
    Moved,
    Record,
    Section,
)
from omniq.storage.claim import PAUSED_QUEUE, Claimed, Claimer, wanted_by
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.gate_states import decode_gate
from omniq.storage.incarnation import (
    STORE,
    GivenTokens,
    StoreRecord,
    check_reader,
    decode_record,
    raised,
    went_back,
)
from omniq.storage.inspection import DeadQuery, TaskQuery, letter_matches
from omniq.storage.known_rows import KnownRows
from omniq.storage.row_rules import FORMAT, Row
from omniq.storage.step import CHECKPOINT, NEWEST, PROGRESS, UNIQUE, EncodeFinish, Step
from omniq.storage.types import Claim, GivenBack, Identity, Renewal

_T = TypeVar("_T")

SCHEDULE = "schedule"
"""The kind of the documents that are schedules."""

_PURGED = 500
"""Records that one step deletes, so that other steps can run in between."""


_LONGEST_STOP = 12 * 3_600_000_000
"""Microseconds after its lease for which an owner that the store has forgotten is sure that it went back.

Later the store may have deleted the fence of an owner that was stopped for that long."""

_CHECKPOINTS = 100
"""Checkpoints that one step reads: each may be large."""

_NOTHING = object()
"""No connection of a caller; None may be given as one by mistake."""


class _StoredSchedule(msgspec.Struct, array_like=True):
    """A schedule without its task's arguments, and the task as the serializer encodes it."""

    version: int
    schedule: Schedule
    task: bytes


class _Checkpoint(msgspec.Struct, array_like=True):
    saved_at: int
    data: bytes


_decode_schedule = internal_decoder(_StoredSchedule)
_decode_checkpoint = internal_decoder(_Checkpoint)
_decode_progress = internal_decoder(Progress)


class _UniqueKeys(msgspec.Struct):
    """The ids of live tasks that hold unique keys, and documents of keys that no live task holds.

    A store that writes rows and documents one after the other may leave such a document behind.
    """

    holders: dict[str, str] = {}
    left_behind: dict[str, bytes] = {}

    def hold(self, key: str, task_id: str) -> DocumentChange:
        """Have the task hold the key."""
        return DocumentChange(UNIQUE, key, self.left_behind.get(key), task_id.encode())


class Engine:
    """The verbs of the storage contract over one backend."""

    def __init__(
        self,
        backend: Backend,
        serializer: Serializer,
        encode_finish: EncodeFinish,
        max_pending: int | None,
        identity: Identity,
        clock: Clock,
    ) -> None:
        self.backend = backend
        backend.identity = identity
        # Nothing of these depends on a rule.
        self.page, self.pause_worker = backend.page, backend.pause_worker
        self._identity = identity
        self._clock = clock
        self._given = GivenTokens()
        self._newer_functions: set[str] = set()
        self._serializer = serializer
        self._encode_finish = encode_finish
        self._max_pending = max_pending
        self._known = KnownRows()

    async def _transact(
        self,
        work: Callable[[Section], Awaitable[_T]],
        *,
        claims_as: str | None = None,
        within: object = _NOTHING,
    ) -> _T:
        """Run `work` in a section; with `within`, in a caller's transaction on that connection."""
        while True:
            try:
                if within is not _NOTHING:
                    return await self.backend.transact_within(within, work)
                return await self.backend.transact(work, claims_as=claims_as)
            except Moved:
                continue

    async def _read(self, work: Callable[[Section], Awaitable[_T]]) -> _T:
        return await self.backend.transact(work, writes=False)

    async def _write(self, changes: Changes) -> None:
        """Write changes that depend on nothing that is stored."""
        await self._transact(_writing(changes))

    # Enqueue

    async def enqueue(self, rows: Sequence[Row], *, within: object = _NOTHING) -> list[str]:
        """Insert the rows, or raise `DuplicateTask` or `QueueFull`; returns an id for each row.

        The first try reads nothing: most ids and unique keys are free. With `within`, they are inserted in
        the transaction that the caller has open on that connection.
        """
        try:
            changes, ids = self.insertion(rows)
            if within is _NOTHING:
                await self.backend.write(changes)
            else:
                await self.backend.transact_within(within, _writing(changes))
            return ids
        except Moved:
            pass
        return await self._transact(lambda section: self._insert(section, rows), within=within)

    async def _insert(self, section: Section, rows: Sequence[Row]) -> list[str]:
        known = await section.load([row.id for row in rows])
        keys = await self._unique_keys(section, rows)
        changes, ids = self._insertion(rows, known, keys)
        if changes.inserted:
            await section.write(changes)
        return ids

    async def _unique_keys(self, section: Section, rows: Sequence[Row]) -> _UniqueKeys:
        wanted = sorted({row.unique for row in rows if row.unique})
        keys = _UniqueKeys({}, {})
        if wanted:
            found = await section.documents(UNIQUE, wanted)
            held = await section.load([document.data.decode() for document in found.values()])
            for key, document in found.items():
                holder = document.data.decode()
                record = held.get(holder)
                if record is not None and record.is_live:
                    keys.holders[key] = holder
                else:
                    keys.left_behind[key] = document.data
        return keys

    def insertion(self, rows: Sequence[Row]) -> tuple[Changes, list[str]]:
        """What to insert if no id and no unique key is taken, and the id that each enqueue returns.

        `Moved` if a row is left out for its unique key: its id may be taken, which has to be read.
        """
        if not [row for row in rows if row.unique]:
            return Changes(inserted=rows, bound=self._max_pending), [row.id for row in rows]
        changes, ids = self._insertion(rows, {}, _UniqueKeys())
        if len(changes.inserted) < len(rows):
            raise Moved
        return changes, ids

    def _insertion(
        self, rows: Sequence[Row], known: dict[str, Record], keys: _UniqueKeys
    ) -> tuple[Changes, list[str]]:
        """What to insert, and the id that each row's enqueue returns."""
        holders = dict(keys.holders)
        ids: list[str] = []
        fresh: list[Row] = []
        documents: list[DocumentChange] = []
        for row in rows:
            record = known.get(row.id)
            if record is not None:
                if record.row.nonce != row.nonce:
                    raise DuplicateTask(row.id)
                ids.append(row.id)
            elif row.unique is not None and row.unique in holders:
                ids.append(holders[row.unique])
            else:
                ids.append(row.id)
                fresh.append(row)
                if row.unique is not None:
                    holders[row.unique] = row.id
                    documents.append(keys.hold(row.unique, row.id))
        return Changes(inserted=fresh, bound=self._max_pending, documents=documents), ids

    # Record and claim

    async def record_and_claim(
        self, owner: str, outcomes: Sequence[Outcome], claim: Claim | None
    ) -> tuple[list[bool], Claimed]:
        """Record the outcomes, then claim; for each outcome whether it is recorded, and the rows."""
        fast_path, met = self.backend.fast_path, self._identity.epoch
        if claim is not None:
            witness, runnable = self._given.witness(met), self._runnable(claim.runnable)
            claim = msgspec.structs.replace(claim, witness=witness, runnable=runnable)
        if fast_path is None:
            recorded, claimed = await self._by_rules(owner, outcomes, claim)
        else:
            recorded, claimed = await self._by_fast_path(fast_path, owner, outcomes, claim)
        # A late reply to an owner that was fenced meanwhile says nothing: its tasks may run again here.
        is_current = owner == self._identity.owner
        if claimed.went_back or (is_current and self._given.add(claimed.rows)):
            await self._begin_epoch(owner, met)
        if any(row.format > FORMAT for row in claimed.rows):
            await self._leave_newer(owner, claimed)
        self._known.update(owner, outcomes, claimed.rows)
        return recorded, claimed

    def _runnable(self, given: Runnable | None) -> Runnable | None:
        """Those of the given functions that have no records of a newer format."""
        if not self._newer_functions:
            return given
        given = given or Runnable(modules=None)
        excluded = given.excluded.union(self._newer_functions)
        return msgspec.structs.replace(given, excluded=excluded)

    async def _leave_newer(self, owner: str, claimed: Claimed) -> None:
        """Release rows of a newer format, and claim no more tasks of their functions.

        A newer omniq has written them, and its workers run them. A row above the store's own format is
        damaged: it loses its body, so that it becomes a dead letter.
        """
        newest = (await self.store_record()).format
        left = [row for row in claimed.rows if FORMAT < row.format <= newest]
        # A copy, because a store in memory has this very row.
        claimed.rows = [
            msgspec.structs.replace(row, body=b"") if row.format > newest else row
            for row in claimed.rows
            if not FORMAT < row.format <= newest
        ]
        if left:
            self._newer_functions.update(row.func_path for row in left)
            released = [Released(row.id, row.token) for row in left]
            await self._by_rules(owner, released, None)

    async def count_newer(self, limit: int) -> int:
        """The number of waiting tasks of a newer format, among the first `limit`."""
        query = TaskQuery(status=TaskStatus.PENDING, limit=limit)
        return sum(row.format > FORMAT for row in await self.page(query))

    async def _by_fast_path(
        self, fast_path: FastPath, owner: str, outcomes: Sequence[Outcome], claim: Claim | None
    ) -> tuple[list[bool], Claimed]:
        changes = self._known.plan(
            owner, outcomes, fast_path.now(), self._encode_finish, self.backend.gate_kinds
        )
        if changes is None:
            # All of them by the rules: a second transaction would cost more than it saves.
            return await self._by_rules(owner, outcomes, claim)
        recorded, claimed = [True] * len(outcomes), Claimed()
        if claim is None and changes.is_empty:
            return recorded, claimed
        reply = await fast_path.record_and_claim(owner, changes, claim)
        if reply.is_behind and claim is not None and claim.witness is not None:
            record = await self.record(claim.witness.id)
            if record is not None and self._is_behind(record.row):
                return recorded, Claimed(went_back=True)
            # It was enqueued again: it would send every claim this way.
            self._given.forget_newest()
        claimed.rows, rest = reply.rows or [], None
        if claim is not None and (reply.rows is None or reply.is_partial):
            rest = msgspec.structs.replace(claim, limit=claim.limit - len(claimed.rows))
        if reply.missed or rest is not None:
            missed = [
                number for number, outcome in enumerate(outcomes) if outcome.task_id in reply.missed
            ]
            answers, by_rules = await self._by_rules(
                owner, [outcomes[number] for number in missed], rest
            )
            for number, answer in zip(missed, answers, strict=True):
                recorded[number] = answer
            # A caller that repeats a call gets the rows that it claimed already.
            by_rules.rows = claimed.rows + by_rules.rows
            claimed = by_rules
        return recorded, claimed

    async def _by_rules(
        self, owner: str, outcomes: Sequence[Outcome], claim: Claim | None
    ) -> tuple[list[bool], Claimed]:
        known = self._known.claimed(owner, outcomes)

        async def record_and_claim(section: Section) -> tuple[list[bool], Claimed]:
            nonlocal known
            # When the step is begun again, the rows may have changed.
            rows, known = known, []
            return await self._record_and_claim(section, owner, outcomes, claim, rows)

        recorded, claimed = await self._transact(
            record_and_claim, claims_as=None if claim is None else owner
        )
        while claim is not None and claimed.is_partial and len(claimed.rows) < claim.limit:
            rest = msgspec.structs.replace(claim, limit=claim.limit - len(claimed.rows))
            _, more = await self._transact(
                lambda section, rest=rest: self._record_and_claim(section, owner, (), rest, ()),  # type: ignore[misc]
                claims_as=owner,
            )
            claimed = Claimed(
                rows=claimed.rows + more.rows,
                expired=claimed.expired + more.expired,
                is_partial=more.is_partial,
                went_back=more.went_back,
            )
        return recorded, claimed

    async def _record_and_claim(
        self,
        section: Section,
        owner: str,
        outcomes: Sequence[Outcome],
        claim: Claim | None,
        known: Sequence[Row],
    ) -> tuple[list[bool], Claimed]:
        unchanged = await section.begin(owner, known, claim)
        step = self._step(section)
        if unchanged:
            await step.add([row_rules.copy_of(row) for row in known if row.id in unchanged])
        recorded = await step.record(owner, outcomes) if outcomes else []
        claimed = Claimed()
        witness = None if claim is None or self.backend.fast_path is not None else claim.witness
        if witness is not None:
            token = await section.live_token(witness.id)
            if token is not None and token < witness.token:
                step.behind += [each.row for each in (await section.load([witness.id])).values()]
        if any(map(self._is_behind, step.behind)):
            claimed.went_back = True
            return recorded, claimed
        if claim is not None:
            section.claim_id = claim.claim_id
            wanted = await wanted_by(step, owner, claim)
            claimed = await Claimer(step, owner, claim, wanted).claim()
        taken = await step.commit()
        if taken:
            claimed.rows = [row for row in claimed.rows if row.id not in taken]
            # Another step claims the rows behind those that others took first.
            claimed.is_partial = True
        return recorded, claimed

    def _is_behind(self, row: Row) -> bool:
        """Whether this owner was given a higher token for the row: the store went back."""
        return self._given.is_above(row, self._identity.epoch)

    def _step(self, section: Section) -> Step:
        return Step(section, self._encode_finish)

    # Transactions of tasks

    @asynccontextmanager
    async def transaction(
        self, owner: str, success: Callable[[], Outcome], *, seconds: float, blocking: bool
    ) -> AsyncIterator[Any]:
        """A transaction that ends by recording the outcome of `success()`, or raises `StaleClaim`."""
        outcomes: list[Outcome] = []

        async def record(section: Section) -> None:
            step = self._step(section)
            outcome = outcomes[0]
            await step.load([outcome.task_id])
            row = step.live(outcome.task_id)
            # A repeated outcome must not end a transaction.
            if row is None or not row_rules.is_current(row, outcome, owner):
                raise StaleClaim(outcome.task_id, outcome.token)
            await step.record(owner, outcomes)
            await step.commit()

        def finish() -> Callable[[Section], Awaitable[None]]:
            outcomes.append(success())
            return record

        try:
            async with self.backend.transaction(
                finish, seconds=seconds, blocking=blocking
            ) as connection:
                yield connection
        except CommitUnknown:
            record_now = await self.record(outcomes[0].task_id)
            if record_now is None or not row_rules.was_recorded(record_now.row, outcomes[0]):
                raise
        self._known.update(owner, outcomes, ())

    # Leases

    async def renew(self, info: WorkerInfo, length: int) -> Renewal:
        """Extend the owner's lease; returns what it holds."""
        holder = self._identity.holder(info.id)
        reply = await self.backend.renew(info, length, holder)
        check_reader(decode_record(reply.store))
        if reply.renewal is None:
            stopped_for = self._clock.boot_micros() - self._identity.lease_until
            if went_back(holder, reply) and (stopped_for < _LONGEST_STOP or not holder.beat):
                await self._begin_epoch(info.id, holder.epoch)
            self._identity.meet(reply.epoch)
            raise LeaseLost(info.id)
        self._identity.count_beat(info.id, reply.epoch, reply.beat)
        return reply.renewal

    async def _begin_epoch(self, owner: str, met: int) -> NoReturn:
        """Raise the epoch of a store that went back, and then `StoreWentBack`.

        `LeaseLost` if another owner has raised it above `met` meanwhile.
        """
        before, after = await self._raise_epoch(met, if_met=True)
        if after.epoch == before.epoch:
            raise LeaseLost(owner)
        lease = seconds_to_micros(self._identity.lease)
        is_repeated = after.raised_at - before.raised_at < lease
        if is_repeated:
            self._identity.claims_from = self._clock.boot_micros() + lease
        raise StoreWentBack(owner, after.epoch, is_repeated=is_repeated)

    async def _raise_epoch(
        self, met: int, *, if_met: bool = False
    ) -> tuple[StoreRecord, StoreRecord]:
        """Raise the epoch, and take their tasks from all owners; returns the record before and after.

        With `if_met`, the epoch stays if it is above `met`.
        """

        async def write(section: Section) -> tuple[StoreRecord, StoreRecord]:
            stored = (await section.documents(STORE, [STORE])).get(STORE)
            record = _store_record(stored)
            if if_met and record.epoch > met:
                return record, record
            after = raised(record, met, section.now)
            data = None if stored is None else stored.data
            change = DocumentChange(STORE, STORE, data, encode_internal(after), due=after.epoch)
            await section.write(Changes(documents=[change]))
            return record, after

        before, after = await self._transact(write)
        self._identity.meet(after.epoch)
        # If that fails, the maintenance of any worker does it.
        with suppress(StorageError):
            await self.give_back(max_crashes=1)
        return before, after

    async def restored(self) -> int:
        """Raise the epoch of a store that was restored; returns it."""
        _, record = await self._raise_epoch(self._identity.epoch)
        return record.epoch

    async def store_record(self) -> StoreRecord:
        """What the store says of itself."""
        found = await self._read(lambda section: section.documents(STORE, [STORE]))
        return _store_record(found.get(STORE))

    async def retire(self, owner: str) -> None:
        """Release what the owner holds, uncharged, and end its lease."""

        async def release(section: Section) -> None:
            step = self._step(section)
            for row in await step.held_by(owner):
                step.release(row)
            await step.commit()

        # Released first: between the two, a crash would be charged to what is still held. And again,
        # because a claim of the owner may have been under way.
        await self._transact(release)
        await self.backend.fence(owner, retires=True)
        await self._transact(release)

    async def give_back(
        self, max_crashes: int, why_ended: Callable[[Lease], str | None] | None = None
    ) -> list[GivenBack]:
        """Fence the owners without a valid lease, and take their tasks from them.

        `why_ended` says why an owner has lost its lease, None if it has not. Without it, the store's clock
        decides.
        """
        given_back: list[GivenBack] = []
        for lease in await self.backend.leases():
            reason = _by_store_clock(lease) if why_ended is None else why_ended(lease)
            if reason is not None and await self._fence(lease):
                given_back += await self._transact(
                    lambda section, owner=lease.owner, reason=reason: self._take_from(  # type: ignore[misc]
                        section, owner, max_crashes, reason
                    )
                )
        return given_back

    async def _fence(self, lease: Lease) -> bool:
        if lease.is_live:
            return await self.backend.fence_overdue(lease)
        return await self.backend.fence(lease.owner)

    async def _take_from(
        self, section: Section, owner: str, max_crashes: int, reason: str
    ) -> list[GivenBack]:
        step = self._step(section)
        rows = await step.held_by(owner)
        tokens = {row.id: row.token for row in rows}
        given_back: list[GivenBack] = []
        store = (await section.documents(STORE, [STORE])).get(STORE)
        epoch = _store_record(store).epoch
        for row, settled in row_rules.give_back(rows, step.now, max_crashes, reason, epoch=epoch):
            step.settle(row, tokens[row.id], settled)
            given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
        await step.commit()
        return given_back

    async def workers(self) -> list[WorkerInfo]:
        """The workers with a valid lease, in id order, with the tasks each holds."""
        live = [lease for lease in await self.backend.leases() if lease.is_live and lease.info]
        running: dict[str, list[str]] = {lease.owner: [] for lease in live}
        for row in await self._read(lambda section: section.held(list(running))):
            running[row.owner or ""].append(row.id)
        return [
            msgspec.structs.replace(lease.info, running=tuple(sorted(running[lease.owner])))
            for lease in live
            if lease.info is not None
        ]

    async def held_by(self, owner: str) -> dict[str, int]:
        """The owner's claims: task id to token."""
        held = await self._read(lambda section: section.held([owner]))
        return {row.id: row.token for row in held}

    # Cancel

    async def cancel(self, task_id: str, reason: str) -> bool:
        """End a waiting task, or ask the owner of a running one to stop it."""

        async def cancel(section: Section) -> bool:
            step = self._step(section)
            await step.load([task_id])
            row = step.live(task_id)
            if row is None:
                return False
            if row.owner is not None:
                row.cancel_requested = True
                step.update(row)
            else:
                step.finish(row, row_rules.finish_cancelled(row, step.now, reason))
            await step.commit()
            return True

        return await self._transact(cancel)

    # Retention

    async def purge_results(self, before: int) -> int:
        """Delete the records of tasks that finished before that instant; returns how many."""
        return await self._purge(FinishedQuery(by="finished_at", before=before - 1, limit=_PURGED))

    async def purge_expired(self) -> int:
        """Delete the records whose `result_ttl` has passed; returns how many."""

        async def read_now(section: Section) -> int:
            return section.now

        now = await self._read(read_now)
        return await self._purge(FinishedQuery(by="expires_at", before=now, limit=_PURGED))

    async def _purge(self, query: FinishedQuery) -> int:
        purged = 0
        while ids := await self.page(query):
            await self._write(Changes(deleted_finished=ids, finished_before=query.before + 1))
            purged += len(ids)
            if len(ids) < query.limit:
                break
            query = msgspec.structs.replace(query, after=ids[-1])
        return purged

    async def delete_task(self, task_id: str) -> bool:
        """Delete the record of a task that has ended; False when there is none."""

        async def delete(section: Section) -> bool:
            record = (await section.load([task_id])).get(task_id)
            if record is None or record.finished is None:
                return False
            await section.write(Changes(deleted_finished=[task_id]))
            return True

        return await self._transact(delete)

    # Dead letters

    async def retry_dead(self, task_id: str, body: bytes | None, *, from_start: bool) -> bool:
        """Put a dead letter's task back into its queue; False when there is no such dead letter."""
        holder = ""

        async def retry(section: Section) -> bool:
            nonlocal holder
            record = (await section.load([task_id], bodies=True)).get(task_id)
            if record is None or record.letter is None:
                return False
            row = copy.copy(record.row)
            keys = await self._unique_keys(section, [row])
            if row.unique is not None and row.unique in keys.holders:
                holder = keys.holders[row.unique]
                return False
            row_rules.retry_dead(row, section.now, body=body)
            # The dead letter may have a checkpoint.
            row.attached = True
            documents = [keys.hold(row.unique, row.id)] if row.unique else []
            if from_start:
                documents.append(DocumentChange(CHECKPOINT, task_id, ANY, None))
            await section.write(
                Changes(
                    inserted=[row],
                    bound=self._max_pending,
                    documents=documents,
                    deleted_finished=[task_id] if record.finished is not None else (),
                    deleted_dead=[task_id],
                )
            )
            return True

        is_retried = await self._transact(retry)
        if holder:
            # A full queue is the first reason, as for an enqueue by its id.
            waiting = 0 if self._max_pending is None else await self.count_waiting()
            if self._max_pending is not None and waiting >= self._max_pending:
                raise QueueFull(self._max_pending)
            raise DuplicateTask(holder)
        return is_retried

    async def delete_dead(self, task_id: str) -> bool:
        """Delete a dead letter and its checkpoint; False when there is none."""

        async def delete(section: Section) -> bool:
            record = (await section.load([task_id])).get(task_id)
            if record is None or record.letter is None:
                # The checkpoint, if there is one, belongs to a live task.
                return False
            await section.write(_deletion_of_dead([task_id]))
            return True

        return await self._transact(delete)

    async def purge_dead(self, before: int) -> int:
        """Delete dead letters whose last failure was before that instant; returns how many."""
        purged = 0
        query = DeadQuery(until=before, limit=_PURGED)
        while letters := await self.page(query):
            ids = [letter.task_id for letter in letters]
            purged += await self._transact(
                lambda section, ids=ids: self._purge_dead(section, ids, query)  # type: ignore[misc]
            )
            if len(letters) < query.limit:
                break
        return purged

    async def _purge_dead(self, section: Section, ids: Sequence[str], query: DeadQuery) -> int:
        """Delete those that are still dead: the checkpoint of one that was retried is a live task's."""
        dead = [
            task_id
            for task_id, record in (await section.load(ids)).items()
            if record.letter is not None and letter_matches(record.letter, query)
        ]
        if dead:
            await section.write(_deletion_of_dead(dead))
        return len(dead)

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        """The dead letter with its checkpoint."""

        async def read(section: Section) -> DeadLetter | None:
            record = (await section.load([task_id])).get(task_id)
            if record is None or record.letter is None:
                return None
            checkpoint = await self._checkpoint(section, task_id)
            return msgspec.structs.replace(record.letter, checkpoint=checkpoint)

        return await self._read(read)

    # Checkpoints and progress

    async def save_checkpoint(self, owner: str, task_id: str, token: int, data: bytes) -> bool:
        """Store the checkpoint of a claim; False when that claim is not the current one."""

        async def save(section: Section) -> bool:
            checkpoint = encode_internal(_Checkpoint(section.now, data))
            change = DocumentChange(CHECKPOINT, task_id, ANY, checkpoint, due=section.now)
            changes = await self._attach(section, owner, {task_id: (token, change)})
            if not changes.documents:
                return False
            await section.write(changes)
            return True

        return await self._transact(save)

    async def _attach(
        self, section: Section, owner: str, documents: dict[str, tuple[int, DocumentChange]]
    ) -> Changes:
        """The documents of claims that are current, and the marks on their rows."""
        changes = Changes()
        found = await section.load(list(documents))
        for task_id, (token, change) in documents.items():
            record = found.get(task_id)
            if record is None or not record.is_live:
                continue
            row = record.row
            if (row.owner, row.token) != (owner, token):
                continue
            changes.documents.append(change)
            if row.attached:
                changes.checked.append(row)
            else:
                row.attached = True
                changes.updated.append(row)
        return changes

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        """The task's checkpoint, or None."""
        return await self._read(lambda section: self._checkpoint(section, task_id))

    async def _checkpoint(self, section: Section, task_id: str) -> bytes | None:
        found = (await section.documents(CHECKPOINT, [task_id])).get(task_id)
        return None if found is None else _decode_checkpoint(found.data).data

    async def purge_checkpoints(self, before: int) -> int:
        """Delete checkpoints saved before that instant whose task is neither live nor a dead letter."""
        query: DocumentQuery | None = DocumentQuery(
            kind=CHECKPOINT, due_by=before - 1, limit=_CHECKPOINTS
        )
        purged = 0
        while query is not None:
            count, query = await self._transact(
                lambda section, query=query: self._purge_checkpoints(section, query)  # type: ignore[misc]
            )
            purged += count
        return purged

    async def _purge_checkpoints(
        self, section: Section, query: DocumentQuery
    ) -> tuple[int, DocumentQuery | None]:
        """Delete the orphans of one page; returns how many, and the query of the next page if there is one."""
        page = await section.find_documents(query)
        found = await section.load([document.key for document in page])
        orphans = [
            DocumentChange(CHECKPOINT, document.key, document.data, None)
            for document in page
            if document.key not in found or _has_ended_well(found[document.key])
        ]
        if orphans:
            await section.write(Changes(documents=orphans))
        if len(page) < query.limit:
            return len(orphans), None
        return len(orphans), msgspec.structs.replace(query, due_after=page[-1].due)

    async def report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        """Store the reports whose claims are current."""

        async def report(section: Section) -> None:
            changes = await self._attach(
                section,
                owner,
                {each.task_id: (each.token, self._progress(each)) for each in reports},
            )
            if changes.documents:
                await section.write(changes)

        await self._transact(report)

    def _progress(self, report: Progress) -> DocumentChange:
        data = seal_document(
            self._serializer, signing.PROGRESS, encode_internal(report), report.task_id
        )
        return DocumentChange(PROGRESS, report.task_id, ANY, data)

    async def get_progress(self, task_id: str) -> Progress | None:
        """The last report of the running task; None for one that cannot be verified."""
        data = await self._document(PROGRESS, task_id)
        if data is None:
            return None
        try:
            data = open_document(self._serializer, signing.PROGRESS, data, task_id)
            return _decode_progress(data)
        except SerializationError:
            return None

    async def newest_result(self, task_id: str) -> bytes | None:
        """The encoded result of a repeating task's newest run."""
        return await self._document(NEWEST, task_id)

    async def _document(self, kind: str, key: str) -> bytes | None:
        found = await self._read(lambda section: section.documents(kind, [key]))
        return found[key].data if key in found else None

    # Schedules

    async def put_schedule(self, schedule: Schedule) -> None:
        """Store it with its `version` if it is new; else with the stored version plus one."""

        async def put(section: Section) -> None:
            stored = (await section.documents(SCHEDULE, [schedule.id])).get(schedule.id)
            version = schedule.version
            if stored is not None:
                stored_version = self._schedule_version(stored)
                if stored_version is not None:
                    version = self._next_version(stored_version)
            await section.write(Changes(documents=[self._schedule(stored, schedule, version)]))

        await self._transact(put)

    def _next_version(self, version: int) -> int:
        return max(version + 1, row_rules.first_token(self._identity.epoch))

    def _schedule(
        self, stored: Document | None, schedule: Schedule, version: int
    ) -> DocumentChange:
        # Arguments and metadata are user data: only the serializer may encode them.
        bare = msgspec.structs.replace(schedule.task, args=(), kwargs={}, metadata={})
        stored_schedule = _StoredSchedule(
            version,
            msgspec.structs.replace(schedule, task=bare),
            unsealed(self._serializer).encode_task(schedule.task),
        )
        data = seal_document(
            self._serializer, signing.SCHEDULE, encode_internal(stored_schedule), schedule.id
        )
        due = None if schedule.next_at is None else to_micros(schedule.next_at)
        before = None if stored is None else stored.data
        return DocumentChange(SCHEDULE, schedule.id, before, data, due)

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        """The schedule as it is now."""
        found = await self._read(lambda section: section.documents(SCHEDULE, [schedule_id]))
        return self._decoded_schedule(found[schedule_id]) if schedule_id in found else None

    def _open_schedule(self, document: Document) -> _StoredSchedule:
        """Verify that this is what was stored under this id, and decode it."""
        return _decode_schedule(
            open_document(self._serializer, signing.SCHEDULE, document.data, document.key)
        )

    def _schedule_version(self, document: Document) -> int | None:
        """The version; None of a schedule that cannot be verified, which never fires."""
        try:
            return self._open_schedule(document).version
        except SerializationError:
            return None

    def _decoded_schedule(self, document: Document) -> Schedule:
        stored = self._open_schedule(document)
        task = unsealed(self._serializer).decode_task(stored.task)
        schedule = msgspec.structs.replace(
            stored.schedule,
            task=task,
            version=stored.version,
            # Earlier versions had no maximum.
            max_missed=min(stored.schedule.max_missed, MAX_MISSED),
        )
        try:
            check_stored_schedule(schedule)
        except InvalidValue as error:
            raise SerializationError(f"schedule {document.key}: {error}") from error
        return schedule

    async def list_schedules(self) -> list[Schedule]:
        """All schedules in id order; one that cannot be decoded is left out."""
        schedules: list[Schedule] = []
        for document in await self._all_documents(SCHEDULE):
            with suppress(SerializationError):
                schedules.append(self._decoded_schedule(document))
        return schedules

    async def _all_documents(self, kind: str) -> list[Document]:
        found: list[Document] = []
        after = ""
        while True:
            query = DocumentQuery(kind=kind, after=after)
            page = await self._read(lambda section, query=query: section.find_documents(query))  # type: ignore[misc]
            found += page
            if len(page) < query.limit:
                return found
            after = page[-1].key

    async def delete_schedule(self, schedule_id: str) -> bool:
        """Delete a schedule; False when there is none."""

        async def delete(section: Section) -> bool:
            stored = (await section.documents(SCHEDULE, [schedule_id])).get(schedule_id)
            if stored is None:
                return False
            change = DocumentChange(SCHEDULE, schedule_id, stored.data, None)
            await section.write(Changes(documents=[change]))
            return True

        return await self._transact(delete)

    async def fire_schedule(
        self, schedule: Schedule, advanced: Schedule, row: Row | None, passed: int | None
    ) -> bool:
        """Insert the row and store `advanced`, if the schedule has not changed meanwhile.

        `passed` is a time that has to have passed by the store's clock.
        """

        async def fire(section: Section) -> bool:
            if passed is not None and passed > section.now:
                return False
            stored = (await section.documents(SCHEDULE, [schedule.id])).get(schedule.id)
            if stored is None:
                return False
            version = self._schedule_version(stored)
            if version is None or version != schedule.version:
                return False
            changes = Changes()
            if row is not None and row.id not in await section.load([row.id]):
                keys = await self._unique_keys(section, [row])
                changes, _ = self._insertion([row], {}, keys)
            changes.documents.append(self._schedule(stored, advanced, self._next_version(version)))
            await section.write(changes)
            return True

        return await self._transact(fire)

    # Queues, workers and gates

    async def pause_queue(self, queue: str, *, paused: bool) -> None:
        """Stop all claims from the queue, or allow them again."""
        data = b"" if paused else None
        await self._write(Changes(documents=[DocumentChange(PAUSED_QUEUE, queue, ANY, data)]))

    async def paused_queues(self) -> frozenset[str]:
        """The queues from which nothing is claimed."""
        return frozenset(document.key for document in await self._all_documents(PAUSED_QUEUE))

    async def gates(self) -> dict[str, GateState]:
        """The state of every gate that says something."""
        states = {each.key: decode_gate(each.data) for each in await self._all_documents(GATE)}
        return {key: state for key, state in states.items() if state is not None}

    # Reading

    async def record(self, task_id: str) -> Record | None:
        """What is stored under the id, with its body."""
        found = await self._read(lambda section: section.load([task_id], bodies=True))
        return found.get(task_id)

    async def stats(self) -> QueueStats:
        """The number of tasks by status and by queue, and the number of dead letters."""
        counts = await self.backend.counts()
        ages = {queue: (counts.now - due) / 1_000_000 for queue, due in counts.oldest.items()}
        due = {queue: age for queue, age in ages.items() if age >= 0}
        return QueueStats(
            by_status=counts.by_status,
            by_queue=counts.by_queue,
            oldest_due_age=max(due.values(), default=0.0),
            dead=counts.dead,
            oldest_by_queue=due,
        )

    async def count_waiting(self) -> int:
        """The number of live tasks that do not run."""
        return (await self.backend.counts(only_waiting=True)).waiting


def _store_record(document: Document | None) -> StoreRecord:
    # Without one, the server has lost everything that the store had.
    return decode_record(None if document is None else document.data) or StoreRecord("")


def _writing(changes: Changes) -> Callable[[Section], Awaitable[frozenset[str]]]:
    return lambda section: section.write(changes)


def _deletion_of_dead(ids: Sequence[str]) -> Changes:
    checkpoints = [DocumentChange(CHECKPOINT, task_id, ANY, None) for task_id in ids]
    return Changes(deleted_dead=ids, documents=checkpoints)


def _has_ended_well(record: Record) -> bool:
    return not record.is_live and record.letter is None


def _by_store_clock(lease: Lease) -> str | None:
    return None if lease.is_live else ""
