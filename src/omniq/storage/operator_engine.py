"""The engine's steps for operators: requests to workers, pauses, limits, the history of runs, the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from omniq.errors import StorageError
from omniq.gate_rules import GateState
from omniq.models import AuditEntry, EndedWorker, Version
from omniq.storage import run_history
from omniq.storage.backend import ANY, Changes, DocumentChange, DocumentQuery, Section
from omniq.storage.engine_base import EngineBase, atomic
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.gate_states import decode_gate
from omniq.storage.pauses import PAUSED_QUEUE, Pause, pause_in, pausing
from omniq.storage.run_counts import PeriodCounts
from omniq.storage.types import Action, WorkerAnswer, WorkerRequest
from omniq.storage.worker_requests import (
    ANSWER,
    REQUEST,
    answer_change,
    decode_answer,
    read_request,
    request_change,
    request_key,
)


class OperatorEngine(EngineBase):
    """The verbs of operators over one backend."""

    # Requests to workers

    async def ask_worker(self, owner: str, request_id: str, action: Action, slots: int = 0) -> bool:
        """Store a request to a worker; False when it has no valid lease."""
        leases = await self.backend.leases()
        if not any(lease.owner == owner and lease.is_live and lease.info for lease in leases):
            return False
        await self._put_dated(
            lambda now: request_change(request_key(owner, request_id), action, now, slots)
        )
        return True

    async def take_requests(self, owner: str) -> list[WorkerRequest]:
        """Delete and return the requests to the worker, which alone takes them. Without any it only reads."""
        query = DocumentQuery(kind=REQUEST, prefix=request_key(owner, ""))
        found = await self._read(lambda section: section.find_documents(query))
        if not found:
            return []
        deleted = [DocumentChange(REQUEST, each.key, ANY, None) for each in found]
        # If the reply is lost they may be gone: rather return them twice than not at all.
        with suppress(StorageError):
            await self._write(Changes(documents=deleted))
        requests = [read_request(document) for document in found]
        return [request for request in requests if request is not None]

    async def pending_requests(self) -> list[WorkerRequest]:
        """The requests that workers have not read yet, in the order of their keys."""
        found = await self._read(
            lambda section: section.find_documents(DocumentQuery(kind=REQUEST))
        )
        requests = [read_request(document) for document in found]
        return [request for request in requests if request is not None]

    async def answer_request(self, request: WorkerRequest, answer: WorkerAnswer) -> None:
        """Store the answer of a worker."""
        await self._put_dated(lambda now: answer_change(request.key, answer, now))

    async def take_answer(self, owner: str, request_id: str) -> WorkerAnswer | None:
        """Delete and return the answer to a request; None while there is none."""
        key = request_key(owner, request_id)
        document = await self._document(ANSWER, key)
        if document is None:
            return None
        await self._write(Changes(documents=[DocumentChange(ANSWER, key, ANY, None)]))
        return decode_answer(document.data) or WorkerAnswer()

    async def withdraw_request(self, owner: str, request_id: str) -> None:
        """Delete a request that is not waited for any more, and its answer."""
        key = request_key(owner, request_id)
        changes = [DocumentChange(kind, key, ANY, None) for kind in (REQUEST, ANSWER)]
        await self._write(Changes(documents=changes))

    async def purge_requests(self, before: int) -> int:
        """Delete requests and answers that were stored before that instant; returns how many."""
        purged = 0
        for kind in (REQUEST, ANSWER):
            query = DocumentQuery(kind=kind, due_by=before - 1)
            found = await self._read(lambda section, query=query: section.find_documents(query))  # type: ignore[misc]
            if found:
                deleted = [DocumentChange(kind, each.key, ANY, None) for each in found]
                await self._write(Changes(documents=deleted))
                purged += len(found)
        return purged

    # Queues and gates

    async def pause(self, key: str, reason: str, until: int | None) -> None:
        """Stop all claims from a queue or of a function."""
        await self._write(Changes(documents=[pausing(key, reason, until)]))

    async def resume(self, key: str) -> None:
        """Allow claims from a queue or of a function again."""
        await self._write(Changes(documents=[DocumentChange(PAUSED_QUEUE, key, ANY, None)]))

    @atomic
    async def resume_due(self, section: Section) -> int:
        """End the pauses whose time has come; returns how many."""
        due = await section.find_documents(DocumentQuery(kind=PAUSED_QUEUE, due_by=section.now))
        ended = [DocumentChange(PAUSED_QUEUE, each.key, each.data, None) for each in due]
        if ended:
            await section.write(Changes(documents=ended))
        return len(ended)

    async def pauses(self) -> list[Pause]:
        """The queues and functions of which nothing is claimed."""
        return [pause_in(each) for each in await self._all_documents(PAUSED_QUEUE)]

    async def paused_queues(self) -> frozenset[str]:
        """The queues from which nothing is claimed."""
        return frozenset(each.queue for each in await self.pauses() if each.queue is not None)

    async def gates(self) -> dict[str, GateState]:
        """The state of every gate that says something."""
        states = {each.key: decode_gate(each.data) for each in await self._all_documents(GATE)}
        return {key: state for key, state in states.items() if state is not None}

    # The history of runs

    @atomic
    async def add_run_counts(
        self, section: Section, owner: str, minutes: Sequence[PeriodCounts]
    ) -> None:
        """Store the owner's counts of these minutes."""
        await section.write(Changes(documents=run_history.new_counts(owner, minutes, section.now)))

    async def merge_run_counts(self) -> int:
        """Add a page of minutes of owners to those of the fleet; returns how many."""
        if not await self._read(run_history.may_merge):
            return 0
        return await self._transact(run_history.merge)

    async def purge_run_counts(self) -> int:
        """Delete a page of what is kept no longer; returns how many."""
        if not await self._read(run_history.may_purge):
            return 0
        return await self._transact(run_history.purge)

    async def run_counts(
        self,
        since: int,
        until: int,
        *,
        hours: bool,
        only_totals: bool,
        function: str | None,
        queue: str | None,
    ) -> list[PeriodCounts]:
        """The counts of the periods between two seconds since 1970."""
        return await self._read(
            lambda section: run_history.read(
                section,
                since,
                until,
                hours=hours,
                only_totals=only_totals,
                function=function,
                queue=queue,
            )
        )

    @atomic
    async def note_version(self, section: Section, version: Version) -> bool:
        """Store when a version was first started; False if it is known."""
        return await run_history.note_version(section, version)

    async def versions(self) -> list[Version]:
        """The versions in the order of their first start."""
        return await self._read(run_history.versions)

    @atomic
    async def add_audit_entry(self, section: Section, entry: AuditEntry, entry_id: str) -> None:
        """Store what an operator has done."""
        change = run_history.audit_entry(entry, entry_id, section.now)
        await section.write(Changes(documents=[change]))

    async def audit_log(self, after: str, limit: int) -> tuple[list[AuditEntry], str]:
        """A page of operator actions, newest first."""
        return await self._read(lambda section: run_history.audit_log(section, after, limit))

    async def ended_workers(self) -> list[EndedWorker]:
        """The workers that ended in the last 24 hours, newest first."""
        return await self._read(run_history.ended_workers)
