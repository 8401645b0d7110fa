"""The engine's steps for workers: leases, the recovery of the tasks of dead workers, stores that went back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import msgspec

from omniq.clock import Clock, from_micros, seconds_to_micros
from omniq.errors import LeaseLost, StorageError, StoreWentBack
from omniq.models import EndedWorker, WorkerInfo
from omniq.serialization import Serializer, encode_internal
from omniq.storage import row_rules, run_history
from omniq.storage.backend import Backend, Changes, Document, DocumentChange, Lease, Section
from omniq.storage.engine_base import atomic
from omniq.storage.flow_engine import FlowEngine
from omniq.storage.incarnation import (
    STORE,
    StoreRecord,
    check_reader,
    decode_record,
    raised,
    went_back,
)
from omniq.storage.types import GivenBack, Identity, Renewal

_LONGEST_STOP = 12 * 3_600_000_000
"""Microseconds after its lease for which an owner that the store has forgotten is sure that it went back.

Later the store may have deleted the fence of an owner that was stopped for that long."""


class RecoveryEngine(FlowEngine):
    """Renews and ends leases, and takes the tasks of owners whose lease has ended."""

    def __init__(
        self,
        backend: Backend,
        serializer: Serializer,
        max_pending: int | None,
        identity: Identity,
        clock: Clock,
    ) -> None:
        super().__init__(backend, serializer, max_pending, identity)
        self._clock = clock
        self._is_worker = False

    async def renew(self, info: WorkerInfo, length: int) -> Renewal:
        """Extend the owner's lease; returns what it holds."""
        holder = self._identity.holder(info.id)
        reply = await self.backend.renew(info, length, holder)
        self._is_worker = bool(info.concurrency)
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
        before, after = await self._write_epoch(met, if_met=if_met)
        self._identity.meet(after.epoch)
        # If that fails, the maintenance of any worker does it.
        with suppress(StorageError):
            await self.give_back(max_crashes=1)
        return before, after

    @atomic
    async def _write_epoch(
        self, section: Section, met: int, *, if_met: bool
    ) -> tuple[StoreRecord, StoreRecord]:
        stored = await section.document(STORE, STORE)
        record = _store_record(stored)
        if if_met and record.epoch > met:
            return record, record
        after = raised(record, met, section.now)
        data = None if stored is None else stored.data
        change = DocumentChange(STORE, STORE, data, encode_internal(after), due=after.epoch)
        await section.write(Changes(documents=[change]))
        return record, after

    async def restored(self) -> int:
        """Raise the epoch of a store that was restored; returns it."""
        _, record = await self._raise_epoch(self._identity.epoch)
        return record.epoch

    async def store_record(self) -> StoreRecord:
        """What the store says of itself."""
        return _store_record(await self._document(STORE, STORE))

    async def retire(self, owner: str) -> None:
        """Release what the owner holds, uncharged, and end its lease."""

        lease = await self._lease_of(owner) if self._is_worker else None
        # Released first: between the two, a crash would be charged to what is still held. And again,
        # because a claim of the owner may have been under way.
        await self._release_all(owner)
        await self.backend.fence(owner, retires=True)
        await self._release_all(owner)
        if lease is not None:
            await self._ended(lease)

    async def _lease_of(self, owner: str) -> Lease | None:
        return next((each for each in await self.backend.leases() if each.owner == owner), None)

    async def _ended(self, lease: Lease, why: str = "", tasks: int = 0) -> None:
        """Store for operators that a worker has ended. Nothing depends on it."""
        if lease.info is None or not lease.info.concurrency:
            return
        ended_at = from_micros(self._clock.micros())
        with suppress(StorageError):
            await self._note_ended(
                EndedWorker(worker=lease.info, ended_at=ended_at, why=why, tasks=tasks)
            )

    @atomic
    async def _note_ended(self, section: Section, ended: EndedWorker) -> None:
        await section.write(Changes(documents=[run_history.ended_worker(ended, section.now)]))

    @atomic
    async def _release_all(self, section: Section, owner: str) -> None:
        step = self._step(section)
        for row in await step.held_by(owner):
            step.release(row)
        await step.commit()

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
                taken = await self._take_from(lease.owner, max_crashes, reason)
                given_back += taken
                await self._ended(lease, reason or "its lease expired", len(taken))
        return given_back

    async def _fence(self, lease: Lease) -> bool:
        if lease.is_live:
            return await self.backend.fence_overdue(lease)
        return await self.backend.fence(lease.owner)

    @atomic
    async def _take_from(
        self, section: Section, owner: str, max_crashes: int, reason: str
    ) -> list[GivenBack]:
        step = self._step(section)
        rows = await step.held_by(owner)
        tokens = {row.id: row.token for row in rows}
        given_back: list[GivenBack] = []
        epoch = _store_record(await section.document(STORE, STORE)).epoch
        for row in rows:
            row_rules.discard_wait(row)
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


def _store_record(document: Document | None) -> StoreRecord:
    # Without one, the server has lost everything that the store had.
    return decode_record(None if document is None else document.data) or StoreRecord("")


def _by_store_clock(lease: Lease) -> str | None:
    return None if lease.is_live else ""
