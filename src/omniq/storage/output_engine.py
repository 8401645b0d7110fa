"""The engine's steps for the output of tasks."""

from __future__ import annotations

from collections.abc import Sequence

from omniq.errors import SerializationError
from omniq.storage import stored_output
from omniq.storage.backend import Changes, Document, Record, Section
from omniq.storage.engine_base import atomic, attach, current_rows
from omniq.storage.retention_engine import RetentionEngine
from omniq.storage.stored_output import Bounds, OutputCodec, OutputQuery, record_name
from omniq.tasks.task_output import OutputBatch, OutputPage

_PURGED = 20
"""Tasks whose output one step deletes: each may have many pages."""


class OutputEngine(RetentionEngine):
    """The verbs of `TaskOutput` over one backend."""

    @atomic
    async def append_output(
        self, section: Section, owner: str, batches: Sequence[OutputBatch], bounds: Bounds
    ) -> list[bool]:
        """Store the batches whose claims are current; for each, whether it is."""
        rows = await current_rows(section, owner, {each.task_id: each.token for each in batches})
        current = [batch for batch in batches if batch.task_id in rows]
        if current:
            codec = OutputCodec(self._serializer)
            changes = Changes()
            changes.documents = await stored_output.append(section, codec, rows, current, bounds)
            if changes.documents:
                for row in rows.values():
                    attach(changes, row)
                await section.write(changes)
        return [batch.task_id in rows for batch in batches]

    async def read_output(self, task_id: str, query: OutputQuery) -> OutputPage | None:
        """Some of the output of a task; None if there is no record of it."""
        codec = OutputCodec(self._serializer)
        return await self._read(lambda section: stored_output.read(section, codec, task_id, query))

    async def purge_expired(self) -> int:
        """Delete the records whose `result_ttl` has passed, and output without a record."""
        purged = await super().purge_expired()
        while await self._read(lambda section: stored_output.due_heads(section, 1)):
            await self._purge_output()
        return purged

    @atomic
    async def _purge_output(self, section: Section) -> None:
        heads = await stored_output.due_heads(section, _PURGED)
        changes = await stored_output.purged(section, heads, self._is_output_of)
        if changes:
            await section.write(Changes(documents=changes))

    def _is_output_of(self, head: Document, record: Record) -> bool:
        try:
            codec = OutputCodec(self._serializer)
            return codec.head(head, record_name(record.newest_row)) is not None
        except SerializationError:
            # Another process may have the key.
            return True
