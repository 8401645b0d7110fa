"""The engine's steps that delete what has expired."""

from __future__ import annotations

import msgspec

from omniq.storage.backend import Changes, DocumentChange, DocumentQuery, FinishedQuery, Section
from omniq.storage.engine_base import EngineBase, atomic
from omniq.storage.fairness import old_documents
from omniq.storage.step import UNIQUE

_PURGED = 500
"""Records that one step deletes, so that other steps can run in between."""


class RetentionEngine(EngineBase):
    """Deletes ended records, unique keys and places in line that are not needed any more."""

    async def purge_expired(self) -> int:
        """Delete the records whose `result_ttl` has passed; returns how many."""

        async def read_now(section: Section) -> int:
            return section.now

        now = await self._read(read_now)
        while await self._purge_unique_keys():
            pass
        while await self._purge_places():
            pass
        return await self._purge(FinishedQuery(by="expires_at", before=now, limit=_PURGED))

    @atomic
    async def _purge_unique_keys(self, section: Section) -> bool:
        """Delete a page of unique keys that tasks have held beyond their ends; whether there may be more."""
        query = DocumentQuery(kind=UNIQUE, due_by=section.now, limit=_PURGED)
        found = await section.find_documents(query)
        holders = await section.load([each.data.decode(errors="replace") for each in found])
        live = {task_id.encode() for task_id, record in holders.items() if record.is_live}
        documents = [
            # The end of a live holder frees its key: it is not found again until then.
            DocumentChange(UNIQUE, each.key, each.data, each.data if each.data in live else None)
            for each in found
        ]
        if documents:
            await section.write(Changes(documents=documents))
        return len(found) == _PURGED

    @atomic
    async def _purge_places(self, section: Section) -> bool:
        """Delete a page of what lines and keys do not need any more; whether there may be more."""
        documents, has_more = await old_documents(section, _PURGED)
        if documents:
            await section.write(Changes(documents=documents))
        return has_more

    async def _purge(self, query: FinishedQuery) -> int:
        purged = 0
        while ids := await self.page(query):
            await self._write(Changes(deleted_finished=ids, finished_before=query.before + 1))
            purged += len(ids)
            if len(ids) < query.limit:
                break
            query = msgspec.structs.replace(query, after=ids[-1])
        return purged
