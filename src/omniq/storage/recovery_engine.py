"""The engine's steps that recover the tasks of workers whose lease has ended, and list the workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from omniq.clock import Clock, from_micros
from omniq.errors import StorageError
from omniq.models import EndedWorker, WorkerInfo
from omniq.serialization import Serializer
from omniq.storage import row_rules, run_history
from omniq.storage.backend import Backend, Changes, Document, Lease, Section
from omniq.storage.engine_base import atomic
from omniq.storage.flow_engine import FlowEngine
from omniq.storage.incarnation import STORE, StoreRecord, decode_record
from omniq.storage.types import GivenBack, Identity


class RecoveryEngine(FlowEngine):
    """Takes the tasks of owners whose lease has ended. `LeaseEngine` renews and ends leases."""

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
        epoch = store_record_of(await section.document(STORE, STORE)).epoch
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


def store_record_of(document: Document | None) -> StoreRecord:
    """What a stored document says of the store."""
    # Without one, the server has lost everything that the store had.
    return decode_record(None if document is None else document.data) or StoreRecord("")


def _by_store_clock(lease: Lease) -> str | None:
    return None if lease.is_live else ""
