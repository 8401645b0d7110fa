"""The engine's steps for schedules, and for documents that an older omniq has stored without a seal."""

from __future__ import annotations

from contextlib import suppress

from omniq import signing
from omniq.clock import to_micros
from omniq.errors import KeyNeeded, NotSealed, SerializationError
from omniq.models import Schedule
from omniq.signing import is_sealed, open_document, unsealed
from omniq.storage import row_rules
from omniq.storage.backend import Changes, Document, DocumentChange, DocumentQuery, Section
from omniq.storage.engine_base import EngineBase, atomic, known_data
from omniq.storage.flow_insertion import FlowInsertion
from omniq.storage.insertion import insertion, read_unique_keys
from omniq.storage.row_rules import Row
from omniq.storage.sealed_documents import (
    OlderDocument,
    StoredSchedule,
    decode_schedule,
    encode_schedule,
    is_sealed_checkpoint,
    older_schedule,
    whole_schedule,
)
from omniq.storage.step import CHECKPOINT

SCHEDULE = "schedule"
"""The kind of the documents that are schedules."""

_CHECKPOINTS = 100
"""Checkpoints that one step reads: each may be large."""


class ScheduleEngine(EngineBase):
    """The verbs of schedules over one backend."""

    @atomic
    async def put_schedule(self, section: Section, schedule: Schedule) -> None:
        """Store it with its `version` if it is new; else with the stored version plus one."""
        stored = await section.document(SCHEDULE, schedule.id)
        known = None if stored is None else self._schedule_version(stored)
        version = schedule.version if known is None else self._next_version(known)
        await section.write(Changes(documents=[self._schedule(stored, schedule, version)]))

    def _next_version(self, version: int) -> int:
        return max(version + 1, row_rules.first_token(self._identity.epoch))

    def _schedule(
        self, stored: Document | None, schedule: Schedule, version: int
    ) -> DocumentChange:
        data = encode_schedule(self._serializer, schedule, version)
        due = None if schedule.next_at is None else to_micros(schedule.next_at)
        before = None if stored is None else known_data(stored)
        return DocumentChange(SCHEDULE, schedule.id, before, data, due)

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        """The schedule as it is now."""
        document = await self._document(SCHEDULE, schedule_id)
        return None if document is None else self._decoded_schedule(document)

    def _open_schedule(self, document: Document) -> StoredSchedule:
        """Verify that this is what was stored under this id, and decode it."""
        if older_schedule(self._serializer, document) is not None:
            raise NotSealed(f"schedule {document.key}")
        return decode_schedule(
            open_document(self._serializer, signing.SCHEDULE, document.data, document.key)
        )

    def _schedule_version(self, document: Document) -> int | None:
        """The version; None of a schedule that cannot be verified, which never fires."""
        try:
            return self._open_schedule(document).version
        except KeyNeeded:
            # To replace it without a key would stop it: workers with the key would not fire it.
            raise
        except SerializationError:
            return None

    def _decoded_schedule(self, document: Document) -> Schedule:
        stored = self._open_schedule(document)
        return whole_schedule(stored, unsealed(self._serializer).decode_task(stored.task))

    async def list_schedules(self) -> list[Schedule]:
        """All schedules in id order; one that cannot be decoded is left out."""
        schedules: list[Schedule] = []
        for document in await self._all_documents(SCHEDULE):
            with suppress(SerializationError):
                schedules.append(self._decoded_schedule(document))
        return schedules

    async def unreadable_schedules(self) -> dict[str, str]:
        """Why each schedule that `list_schedules` leaves out cannot be decoded, by id."""
        found: dict[str, str] = {}
        for document in await self._all_documents(SCHEDULE):
            try:
                self._decoded_schedule(document)
            except SerializationError as error:
                found[document.key] = str(error)
        return found

    @atomic
    async def delete_schedule(self, section: Section, schedule_id: str) -> bool:
        """Delete a schedule; False when there is none."""
        stored = await section.document(SCHEDULE, schedule_id)
        if stored is None:
            return False
        change = DocumentChange(SCHEDULE, schedule_id, known_data(stored), None)
        await section.write(Changes(documents=[change]))
        return True

    @atomic
    async def fire_schedule(
        self,
        section: Section,
        schedule: Schedule,
        advanced: Schedule,
        row: Row | None,
        passed: int | None,
    ) -> bool:
        """Insert the row and store `advanced`, if the schedule has not changed meanwhile.

        `passed` is a time that has to have passed by the store's clock.
        """
        if passed is not None and passed > section.now:
            return False
        stored = await section.document(SCHEDULE, schedule.id)
        version = None if stored is None else self._schedule_version(stored)
        if version is None or version != schedule.version:
            return False
        changes = Changes()
        if row is not None and await section.record(row.id) is None:
            keys = await read_unique_keys(section, [row], self._seals)
            changes, _ = insertion([row], self._max_pending, keys=keys)
            if changes.inserted and row.workflow is not None:
                flow = FlowInsertion(changes, {}, section.now)
                await flow.join_sequences(section, in_transaction=False)
        changes.documents.append(self._schedule(stored, advanced, self._next_version(version)))
        await section.write(changes)
        return True

    # Documents of an older omniq

    async def older_schedules(self) -> list[OlderDocument]:
        """The schedules that wait for a seal."""
        documents = await self._all_documents(SCHEDULE) if is_sealed(self._serializer) else []
        found = [older_schedule(self._serializer, document) for document in documents]
        return [older for older in found if older is not None]

    async def older_checkpoints(self, after: str = "") -> tuple[list[tuple[Document, Row]], str]:
        """Those without a seal of a page of checkpoints, each with its task's row, if there is a key.

        And the last key of the page, if another one follows.
        """
        if not is_sealed(self._serializer):
            return [], ""
        query = DocumentQuery(kind=CHECKPOINT, after=after, limit=_CHECKPOINTS)
        page = await self._read(lambda section: section.find_documents(query))
        older = [document for document in page if not is_sealed_checkpoint(document)]
        records = [await self.record(document.key) for document in older]
        found = [
            (document, record.newest_row)
            for document, record in zip(older, records, strict=True)
            if record is not None
        ]
        return found, page[-1].key if len(page) == query.limit else ""

    @atomic
    async def seal(self, section: Section, document: Document, sealed: bytes) -> bool:
        """Store the document with a seal; False if it has changed since it was read."""
        stored = await section.document(document.kind, document.key)
        if stored is None or stored.data != document.data:
            return False
        change = DocumentChange(stored.kind, stored.key, stored.data, sealed, stored.due)
        await section.write(Changes(documents=[change]))
        return True
