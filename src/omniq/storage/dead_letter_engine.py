"""The engine's steps for dead letters: retry, delete, and the hooks that are still to be called."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from omniq.errors import DuplicateTask, QueueFull, SerializationError
from omniq.models import StoredLetter
from omniq.storage import row_rules
from omniq.storage.backend import ANY, Changes, DocumentChange, DocumentQuery, Section
from omniq.storage.checkpoint_engine import checkpoint_of
from omniq.storage.engine_base import EngineBase, atomic
from omniq.storage.insertion import read_unique_keys
from omniq.storage.inspection import DeadQuery, letter_matches
from omniq.storage.pending_hooks import HOOK, read_hook, taken_over
from omniq.storage.row_rules import Row
from omniq.storage.sequences import LoadedRows, Sequences, key_of
from omniq.storage.step import CHECKPOINT
from omniq.storage.stored_output import forgotten
from omniq.storage.types import PendingHook

_PURGED = 500
"""Records that one step deletes, so that other steps can run in between."""


class DeadLetterEngine(EngineBase):
    """The verbs of dead letters over one backend."""

    async def retry_dead(self, task_id: str, edited: Row | None, *, from_start: bool) -> bool:
        """Put a dead letter's task back into its queue; False when there is no such dead letter.

        `edited` is a row of the same task with another call.
        """
        holder = ""

        async def retry(section: Section) -> bool:
            nonlocal holder
            record = await section.record(task_id, bodies=True)
            if record is None or record.letter is None:
                return False
            row = copy.copy(record.row)
            row_rules.retry_dead(row, section.now, edited=edited, from_start=from_start)
            row_rules.put_back(row)
            parent = await _live_parent(section, row)
            if parent is not None:
                row_rules.rejoin(parent, record.newest_row.status)
            if self._seals is not None:
                self._seals.rename_unique_key(row)
            keys = await read_unique_keys(section, [row], self._seals)
            if row.unique is not None and keys.holders.get(row.unique, task_id) != task_id:
                holder = keys.holders[row.unique]
                return False
            # The dead letter may have a checkpoint.
            row.attached = True
            documents = keys.hold(row)
            documents.append(DocumentChange(HOOK, task_id, ANY, None))
            others = LoadedRows(section, [] if parent is None else [parent])
            if key_of(row) is not None:
                sequences = Sequences(section, others)
                await sequences.rejoin([row])
                documents += sequences.changes()
            if from_start:
                documents.append(DocumentChange(CHECKPOINT, task_id, ANY, None))
            await section.write(
                Changes(
                    inserted=[row],
                    updated=list(others.updated.values()),
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
        return await self._delete_dead([task_id], DeadQuery()) == 1

    async def purge_dead(self, before: int) -> int:
        """Delete dead letters whose last failure was before that instant; returns how many."""
        purged = 0
        query = DeadQuery(until=before, limit=_PURGED)
        while letters := await self.page(query):
            purged += await self._delete_dead([letter.task_id for letter in letters], query)
            if len(letters) < query.limit:
                break
        return purged

    @atomic
    async def _delete_dead(self, section: Section, ids: Sequence[str], query: DeadQuery) -> int:
        """Delete those that are dead, as the query describes, with all that they have; returns how many.

        If one was retried meanwhile, its checkpoint is that of a live task.
        """
        dead = {
            task_id: record
            for task_id, record in (await section.load(ids)).items()
            if record.letter is not None and letter_matches(record.letter, query)
        }
        if dead:
            others = LoadedRows(section)
            sequences = Sequences(section, others)
            await sequences.let_go([record.row for record in dead.values()])
            documents = [
                DocumentChange(kind, task_id, ANY, None)
                for kind in (CHECKPOINT, HOOK)
                for task_id in dead
            ]
            gone = [task_id for task_id, record in dead.items() if record.finished is None]
            documents += await forgotten(section, list(dead), gone)
            await section.write(
                Changes(
                    updated=list(others.updated.values()),
                    deleted_dead=list(dead),
                    documents=documents + sequences.changes(),
                )
            )
        return len(dead)

    async def get_dead(self, task_id: str) -> tuple[StoredLetter, Row] | None:
        """The dead letter with its checkpoint, and the row of its task."""

        async def read(section: Section) -> tuple[StoredLetter, Row] | None:
            record = await section.record(task_id)
            if record is None or record.letter is None:
                return None
            checkpoint = None
            # The letter is shown without a damaged one.
            with suppress(SerializationError):
                checkpoint = await checkpoint_of(section, task_id)
            return msgspec.structs.replace(record.letter, checkpoint=checkpoint), record.row

        return await self._read(read)

    # Pending hooks

    async def pending_hook(self, task_id: str) -> PendingHook | None:
        """The pending hook of a dead letter; None for one that cannot be verified."""
        document = await self._document(HOOK, task_id)
        return None if document is None else read_hook(self._serializer, document)

    async def pending_hooks(self, after: str, limit: int) -> tuple[list[PendingHook], str]:
        """A page of pending hooks in order of their tasks' ids, and the last id if another page follows."""
        query = DocumentQuery(kind=HOOK, after=after, limit=limit)
        page = await self._read(lambda section: section.find_documents(query))
        hooks = [read_hook(self._serializer, document) for document in page]
        found = [hook for hook in hooks if hook is not None]
        return found, page[-1].key if len(page) == limit else ""

    @atomic
    async def take_hook(self, section: Section, hook: PendingHook, owner: str) -> bool:
        """Have that owner call the hook; False if it is done, or another one has taken it."""
        stored = await section.document(HOOK, hook.task_id)
        if stored is None or read_hook(self._serializer, stored) != hook:
            return False
        record = await section.record(hook.task_id)
        is_dead = record is not None and record.letter is not None
        change = DocumentChange(HOOK, hook.task_id, stored.data, None)
        if is_dead:
            change = taken_over(self._serializer, stored, owner)
        # Without a dead letter it was left behind.
        await section.write(Changes(documents=[change]))
        return is_dead

    @atomic
    async def end_hook(self, section: Section, task_id: str, token: int) -> None:
        """Forget the hook of the dead letter that this claim has ended in: it was called."""
        stored = await section.document(HOOK, task_id)
        hook = None if stored is None else read_hook(self._serializer, stored)
        if stored is not None and hook is not None and hook.token == token:
            change = DocumentChange(HOOK, task_id, stored.data, None)
            await section.write(Changes(documents=[change]))


async def _live_parent(section: Section, row: Row) -> Row | None:
    """The record that the row belongs to, if it has not ended."""
    parent_id = None if row.workflow is None else row.workflow.parent
    record = None if parent_id is None else await section.record(parent_id)
    if record is None or not record.is_live:
        return None
    record.row.attached = True
    return record.row
