"""The engine's steps for checkpoints and progress, which belong to a claim."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from omniq import signing
from omniq.errors import SerializationError
from omniq.models import Progress
from omniq.serialization import encode_internal, internal_decoder
from omniq.signing import open_document, seal_document
from omniq.storage.backend import ANY, Changes, DocumentChange, DocumentQuery, Record, Section
from omniq.storage.engine_base import EngineBase, atomic, attach, current_rows, known_data
from omniq.storage.sealed_documents import StoredCheckpoint, decode_checkpoint
from omniq.storage.step import CHECKPOINT, PROGRESS

_CHECKPOINTS = 100
"""Checkpoints that one step reads: each may be large."""

_decode_progress = internal_decoder(Progress)


class CheckpointEngine(EngineBase):
    """The verbs of checkpoints and progress over one backend."""

    @atomic
    async def save_checkpoint(
        self, section: Section, owner: str, task_id: str, token: int, data: bytes
    ) -> bool:
        """Store the checkpoint of a claim; False when that claim is not the current one."""
        checkpoint = encode_internal(StoredCheckpoint(section.now, data))
        change = DocumentChange(CHECKPOINT, task_id, ANY, checkpoint, due=section.now)
        changes = await _attachment(section, owner, {task_id: (token, change)})
        if not changes.documents:
            return False
        await section.write(changes)
        return True

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        """The task's checkpoint, or None."""
        return await self._read(lambda section: checkpoint_of(section, task_id))

    async def purge_checkpoints(self, before: int) -> int:
        """Delete checkpoints saved before that instant whose task is neither live nor a dead letter."""
        query: DocumentQuery | None = DocumentQuery(
            kind=CHECKPOINT, due_by=before - 1, limit=_CHECKPOINTS
        )
        purged = 0
        while query is not None:
            count, query = await self._purge_checkpoints(query)
            purged += count
        return purged

    @atomic
    async def _purge_checkpoints(
        self, section: Section, query: DocumentQuery
    ) -> tuple[int, DocumentQuery | None]:
        """Delete the orphans of one page; returns how many, and the query of the next page if there is one."""
        page = await section.find_documents(query)
        found = await section.load([document.key for document in page])
        orphans = [
            DocumentChange(CHECKPOINT, document.key, known_data(document), None)
            for document in page
            if document.key not in found or _has_ended_well(found[document.key])
        ]
        if orphans:
            await section.write(Changes(documents=orphans))
        if len(page) < query.limit:
            return len(orphans), None
        return len(orphans), msgspec.structs.replace(query, due_after=page[-1].due)

    @atomic
    async def report_progress(
        self, section: Section, owner: str, reports: Sequence[Progress]
    ) -> None:
        """Store the reports whose claims are current."""
        documents = {each.task_id: (each.token, self._progress(each)) for each in reports}
        changes = await _attachment(section, owner, documents)
        if changes.documents:
            await section.write(changes)

    def _progress(self, report: Progress) -> DocumentChange:
        data = seal_document(
            self._serializer, signing.PROGRESS, encode_internal(report), report.task_id
        )
        return DocumentChange(PROGRESS, report.task_id, ANY, data)

    async def get_progress(self, task_id: str) -> Progress | None:
        """The last report of the running task; None for one that cannot be verified."""
        return (await self.progress_of([task_id])).get(task_id)

    async def progress_of(self, task_ids: Sequence[str]) -> dict[str, Progress]:
        """The last reports of these tasks, without those that cannot be verified."""
        found = await self._read(lambda section: section.documents(PROGRESS, task_ids))
        reports: dict[str, Progress] = {}
        for task_id, document in found.items():
            with suppress(SerializationError):
                data = open_document(self._serializer, signing.PROGRESS, document.data, task_id)
                reports[task_id] = _decode_progress(data)
        return reports


async def _attachment(
    section: Section, owner: str, documents: dict[str, tuple[int, DocumentChange]]
) -> Changes:
    """The documents of claims that are current, and the marks on their rows."""
    changes = Changes()
    tokens = {task_id: token for task_id, (token, _) in documents.items()}
    for task_id, row in (await current_rows(section, owner, tokens)).items():
        changes.documents.append(documents[task_id][1])
        attach(changes, row)
    return changes


async def checkpoint_of(section: Section, task_id: str) -> bytes | None:
    """The task's checkpoint, or None."""
    found = await section.document(CHECKPOINT, task_id)
    return None if found is None else decode_checkpoint(found.data).data


def _has_ended_well(record: Record) -> bool:
    return not record.is_live and record.letter is None
