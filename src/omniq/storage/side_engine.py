"""The engine's steps beside the queue: retention, dead letters, checkpoints, progress, schedules, pauses.

And what all steps of the engine share. `engine` has the steps of tasks that run.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from omniq import signing
from omniq.clock import to_micros
from omniq.errors import (
    DuplicateTask,
    KeyNeeded,
    NotSealed,
    QueueFull,
    SerializationError,
    StorageError,
)
from omniq.gate_rules import GateState
from omniq.models import (
    AuditEntry,
    EndedWorker,
    Progress,
    QueueStats,
    Schedule,
    StoredLetter,
    Version,
)
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.signing import is_sealed, open_document, seal_document, unsealed
from omniq.storage import row_rules, run_history
from omniq.storage.backend import (
    ANY,
    Backend,
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    FinishedQuery,
    Moved,
    Record,
    Section,
)
from omniq.storage.fairness import old_documents
from omniq.storage.flow_insertion import FlowInsertion
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.gate_states import decode_gate
from omniq.storage.insertion import insertion, read_unique_keys
from omniq.storage.inspection import DeadQuery, letter_matches
from omniq.storage.pauses import PAUSED_QUEUE, Pause, pause_in, pausing
from omniq.storage.pending_hooks import HOOK, read_hook, taken_over
from omniq.storage.row_rules import Row
from omniq.storage.row_seals import row_seals
from omniq.storage.run_counts import PeriodCounts
from omniq.storage.sealed_documents import (
    OlderDocument,
    StoredCheckpoint,
    StoredSchedule,
    decode_checkpoint,
    decode_schedule,
    encode_schedule,
    is_sealed_checkpoint,
    older_schedule,
    whole_schedule,
)
from omniq.storage.sequences import LoadedRows, Sequences, key_of
from omniq.storage.step import CHECKPOINT, NEWEST, PROGRESS, UNIQUE
from omniq.storage.stored_output import forgotten
from omniq.storage.types import Action, Identity, PendingHook, WorkerAnswer, WorkerRequest
from omniq.storage.worker_requests import (
    ANSWER,
    REQUEST,
    answer_change,
    decode_answer,
    read_request,
    request_change,
    request_key,
)

SCHEDULE = "schedule"
"""The kind of the documents that are schedules."""

_PURGED = 500
"""Records that one step deletes, so that other steps can run in between."""

_CHECKPOINTS = 100
"""Checkpoints that one step reads: each may be large."""

_TRIES = 1_000
"""How often a step is begun. Each failure means that another step has made progress."""

_TRIES_WITHIN = 10
"""How often a step is begun in a caller's transaction, which may not see what others have committed."""

NOWHERE = object()
"""No connection of a caller; None may be given as one by mistake."""

_T = TypeVar("_T")
_P = ParamSpec("_P")
_E = TypeVar("_E", bound="SideEngine")


def atomic(
    step: Callable[Concatenate[_E, Section, _P], Awaitable[_T]],
) -> Callable[Concatenate[_E, _P], Awaitable[_T]]:
    """Make a method that takes a section one atomic step: callers call it without the section."""

    @wraps(step)
    async def run(self: _E, /, *args: _P.args, **options: _P.kwargs) -> _T:
        return await self._transact(lambda section: step(self, section, *args, **options))

    return run


_decode_progress = internal_decoder(Progress)


class SideEngine:
    """The verbs of `SideData` and `Inspection` over one backend."""

    def __init__(
        self,
        backend: Backend,
        serializer: Serializer,
        max_pending: int | None,
        identity: Identity,
    ) -> None:
        self.backend = backend
        backend.identity = identity
        # Nothing of these depends on a rule.
        self.page, self.pause_worker = backend.page, backend.pause_worker
        self._identity = identity
        self._serializer = serializer
        self._seals = row_seals(serializer)
        self._max_pending = max_pending

    async def _transact(
        self,
        work: Callable[[Section], Awaitable[_T]],
        *,
        claims_as: str | None = None,
        within: object = NOWHERE,
    ) -> _T:
        """Run `work` in a section; with `within`, in a caller's transaction on that connection."""
        if within is not NOWHERE:
            return await self._transact_within(within, work)
        for _ in range(_TRIES):
            with suppress(Moved):
                return await self.backend.transact(work, claims_as=claims_as)
        raise StorageError(
            f"gave up: what this call reads was changed {_TRIES:,} times before it could write; a stored "
            "record may be damaged: run omniq doctor"
        )

    async def _transact_within(
        self, connection: object, work: Callable[[Section], Awaitable[_T]]
    ) -> _T:
        for _ in range(_TRIES_WITHIN):
            with suppress(Moved):
                return await self.backend.transact_within(connection, work)
        raise StorageError(
            "enqueue on the given connection: its transaction does not see the task that has the same id or "
            "unique key, since it began before that task was committed; roll it back, and begin it again"
        )

    async def _read(self, work: Callable[[Section], Awaitable[_T]]) -> _T:
        return await self.backend.transact(work, writes=False)

    @atomic
    async def _write(self, section: Section, changes: Changes) -> None:
        """Write changes that depend on nothing that is stored."""
        await section.write(changes)

    async def _document(self, kind: str, key: str) -> Document | None:
        return await self._read(lambda section: section.document(kind, key))

    async def _all_documents(self, kind: str) -> list[Document]:
        found: list[Document] = []
        query = DocumentQuery(kind=kind)
        while True:
            page = await self._read(lambda section, query=query: section.find_documents(query))  # type: ignore[misc]
            found += page
            if len(page) < query.limit:
                return found
            query = msgspec.structs.replace(query, after=page[-1].key)

    # Reading

    async def record(self, task_id: str) -> Record | None:
        """What is stored under the id, with its body."""
        return await self._read(lambda section: section.record(task_id, bodies=True))

    async def newest_result(self, task_id: str) -> bytes | None:
        """The encoded result of a repeating task's newest run."""
        document = await self._document(NEWEST, task_id)
        return None if document is None else document.data

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

    # Retention

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

    # Dead letters

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
                checkpoint = await _checkpoint_of(section, task_id)
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

    # Checkpoints and progress

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
        return await self._read(lambda section: _checkpoint_of(section, task_id))

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
            DocumentChange(CHECKPOINT, document.key, _known_data(document), None)
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

    # Schedules

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
        before = None if stored is None else _known_data(stored)
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
        change = DocumentChange(SCHEDULE, schedule_id, _known_data(stored), None)
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

    @atomic
    async def _put_dated(self, section: Section, make: Callable[[int], DocumentChange]) -> None:
        await section.write(Changes(documents=[make(section.now)]))

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
        wanted = {"hours": hours, "only_totals": only_totals, "function": function, "queue": queue}
        return await self._read(
            lambda section: run_history.read(section, since, until, **wanted)  # type: ignore[arg-type]
        )

    @atomic
    async def note_version(self, section: Section, version: Version) -> bool:
        """Store when a version was first started; False if it is known."""
        return await run_history.note_version(section, version)

    async def versions(self) -> list[Version]:
        """The versions in the order of their first start."""
        return await self._read(run_history.versions)

    @atomic
    async def _note_ended(self, section: Section, ended: EndedWorker) -> None:
        await section.write(Changes(documents=[run_history.ended_worker(ended, section.now)]))

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


async def current_rows(section: Section, owner: str, tokens: dict[str, int]) -> dict[str, Row]:
    """The rows that the owner holds by these tokens."""
    found = await section.load(list(tokens))
    return {
        task_id: record.row
        for task_id, record in found.items()
        if record.is_live and (record.row.owner, record.row.token) == (owner, tokens[task_id])
    }


def attach(changes: Changes, row: Row) -> None:
    """Mark a row that it may have documents; one that is marked must not have changed."""
    if row.attached:
        changes.checked.append(row)
    else:
        row.attached = True
        changes.updated.append(row)


async def _live_parent(section: Section, row: Row) -> Row | None:
    """The record that the row belongs to, if it has not ended."""
    parent_id = None if row.workflow is None else row.workflow.parent
    record = None if parent_id is None else await section.record(parent_id)
    if record is None or not record.is_live:
        return None
    record.row.attached = True
    return record.row


async def _checkpoint_of(section: Section, task_id: str) -> bytes | None:
    found = await section.document(CHECKPOINT, task_id)
    return None if found is None else decode_checkpoint(found.data).data


def _known_data(document: Document) -> bytes:
    """What a change of the document compares; one that is too large was not read, and is not compared."""
    data: bytes = document.data or ANY
    return data


def _has_ended_well(record: Record) -> bool:
    return not record.is_live and record.letter is None
