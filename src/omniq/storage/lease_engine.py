"""The engine's steps for the lease of one owner: it is renewed and ended, and a store that went back is noticed."""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn

from omniq.clock import seconds_to_micros
from omniq.errors import LeaseLost, StorageError, StoreWentBack
from omniq.models import WorkerInfo
from omniq.serialization import encode_internal
from omniq.storage.backend import Changes, DocumentChange, Lease, Section
from omniq.storage.engine_base import atomic
from omniq.storage.incarnation import (
    STORE,
    StoreRecord,
    check_reader,
    decode_record,
    raised,
    went_back,
)
from omniq.storage.recovery_engine import RecoveryEngine, store_record_of
from omniq.storage.types import Renewal

_LONGEST_STOP = 12 * 3_600_000_000
"""Microseconds after its lease for which an owner that the store has forgotten is sure that it went back.

Later the store may have deleted the fence of an owner that was stopped for that long."""


class LeaseEngine(RecoveryEngine):
    """Renews and ends the lease of this owner, and raises the epoch of a store that went back."""

    _is_worker = False
    """Whether the last renewal was that of a worker, and not of an owner that claims without one."""

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
        record = store_record_of(stored)
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
        return store_record_of(await self._document(STORE, STORE))

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

    @atomic
    async def _release_all(self, section: Section, owner: str) -> None:
        step = self._step(section)
        for row in await step.held_by(owner):
            step.release(row)
        await step.commit()
