"""The engine's steps for workflows: cancelling all records below another, events, groups, retries, retention.

The effects of the end of a record on others are in `release_dependents`. Work that a step does not complete is stored in documents
of the kind `flow_work`; `advance` does it in further steps.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from omniq.errors import InvalidTask
from omniq.failpoints import hit
from omniq.models import TaskStatus
from omniq.storage import row_rules
from omniq.storage.backend import (
    ANY,
    Changes,
    Document,
    DocumentChange,
    DocumentQuery,
    FinishedQuery,
    Record,
    Section,
)
from omniq.storage.engine_base import atomic
from omniq.storage.inspection import TaskQuery
from omniq.storage.output_engine import OutputEngine
from omniq.storage.pending_hooks import HOOK
from omniq.storage.release_dependents import (
    FLOW_WORK,
    Edge,
    FlowWork,
    add_edges,
    decode_work,
    work_change,
)
from omniq.storage.row_rules import FinishedRow, Row, Workflow
from omniq.storage.sequences import Sequences
from omniq.storage.step import Step
from omniq.storage.stored_output import forgotten

_BELOW = 200
"""The number of records below another that one step cancels or deletes."""

_WORK_READ = 100
_SHORT, _IN_TURN = ("release/", "settle/", "join/"), 4
"""The actions that a worker may do in its turn before it claims, and how many of them."""
_LATER = 60_000_000
"""Microseconds after which the deletion of records that are still live is retried."""

MAX_REVIVED = 1_000


class FlowEngine(OutputEngine):
    """The verbs of workflows over one backend."""

    has_work = False
    """Whether steps of this object have stored remaining work."""

    @abstractmethod
    def _step(self, section: Section) -> Step: ...

    # Remaining work

    async def advance(self, *, in_turn: bool = False) -> bool:
        """Do one piece of each remaining work that is due; returns whether there was any.

        In the turn of a worker, only a few pieces that take one short step each.
        """
        self.has_work = False

        async def find(section: Section) -> list[Document]:
            query = DocumentQuery(kind=FLOW_WORK, due_by=section.now, limit=_WORK_READ)
            return await section.find_documents(query)

        found = await self._read(find)
        if in_turn:
            found = [each for each in found if each.key.startswith(_SHORT)][:_IN_TURN]
        for document in found:
            await self._do(document)
        self.has_work = self.has_work or bool(found)
        return bool(found)

    async def _do(self, document: Document) -> None:
        work = decode_work(document.data)
        match work:
            case None:
                # Not written by omniq.
                await self._do_step(document, None)
            case FlowWork(action="cancel"):
                await self._cancel_below(work)
                await self._do_step(document, None)
            case FlowWork(action="purge"):
                if await self._purge_below(work.id):
                    await self._do_step(document, None)
                else:
                    await self._postpone(document, work)
            case _:
                await self._do_step(document, work)

    @atomic
    async def _do_step(self, section: Section, document: Document, work: FlowWork | None) -> None:
        """Do work that takes one step, unless another owner has done it, and delete its document."""
        stored = await section.document(FLOW_WORK, document.key)
        if stored is None or stored.data != document.data:
            return
        step = self._step(section)
        step.ends.resume(stored, work if work is not None and work.action == "release" else None)
        if work is not None and work.action == "join":
            await step.ends.join_sequences(work.sources)
        elif work is not None and work.action in ("settle", "expire"):
            await step.read([work.id])
            row = step.live(work.id)
            if row is not None:
                self._settle_or_expire(step, row, work)
        hit("release.between_pages")
        await step.commit()

    def _settle_or_expire(self, step: Step, row: Row, work: FlowWork) -> None:
        if work.action == "expire":
            if row.workflow is None or row.workflow.kind == "event":
                step.finish(row, row_rules.finish_cancelled(row, step.now, "expired"))
            elif row.workflow.is_open:
                self._cancel_row(step, row, work.reason)
        elif work.sources:
            step.ends.begin_wait(row, work.sources)
        else:
            step.ends.end_if_complete(row)

    @atomic
    async def _postpone(self, section: Section, document: Document, work: FlowWork) -> None:
        change = work_change(work, section.now + _LATER, document.data)
        await section.write(Changes(documents=[change]))

    async def _finish_work(self) -> None:
        """Do all remaining work that is due, including that of this object's steps."""
        while self.has_work:
            await self.advance()

    # Records below another

    async def below(self, root: str, *, after: str = "") -> AsyncIterator[list[Row]]:
        """Pages of all records below another, live and ended, in id order.

        The id of a record begins with that of its parent, but only its `parent` decides.
        """
        start = f"{root}."
        after = max(after, start)
        parents = await self._parents_up_to(root, after)
        while True:
            page = await self.page(TaskQuery(after=after, limit=_BELOW))
            rows: list[Row] = []
            for row in page:
                if not row.id.startswith(start):
                    break
                if row.workflow is not None and row.workflow.parent in parents:
                    rows.append(row)
                    if row.workflow.size:
                        parents.add(row.id)
            if rows:
                yield rows
            if len(page) < _BELOW or not page[-1].id.startswith(start):
                return
            after = page[-1].id

    async def _parents_up_to(self, root: str, after: str) -> set[str]:
        """The root, and those records below it whose members a page after that id may begin with."""
        parents, names = {root}, after.removeprefix(f"{root}.").split(".")
        above = [
            f"{root}.{'.'.join(names[:end])}"
            for end in range(1, len(names) + 1)
            if after != f"{root}."
        ]
        found = await self.records(above) if above else {}
        for task_id in above:
            if task_id in found and _parent_of(found[task_id]) in parents:
                parents.add(task_id)
        return parents

    # Cancel

    async def cancel(self, task_id: str, reason: str) -> bool:
        """Cancel a task and all records below it: end it if it waits, ask its owner to stop it if it runs."""
        is_cancelled = await self._cancel(task_id, reason)
        await self._finish_work()
        return is_cancelled

    @atomic
    async def _cancel(self, section: Section, task_id: str, reason: str) -> bool:
        step = self._step(section)
        await step.load([task_id])
        row = step.live(task_id)
        if row is None:
            return False
        self._cancel_row(step, row, reason)
        await step.commit()
        return True

    def _cancel_row(self, step: Step, row: Row, reason: str) -> None:
        workflow = row.workflow
        is_group = workflow is not None and workflow.kind == "group"
        if row.owner is None and not (is_group and workflow is not None and workflow.members):
            step.finish(row, row_rules.finish_cancelled(row, step.now, reason))
            return
        row.cancel_requested = True
        step.update(row)
        if workflow is not None and workflow.size and not step.ends.covers_below:
            work = FlowWork(action="cancel", id=row.id, reason=reason)
            step.ends.put_work(work, step.now)

    async def _cancel_below(self, work: FlowWork) -> None:
        # Repeat while there are new records: a task may have added some before it was cancelled.
        has_changed = True
        while has_changed:
            has_changed = False
            survivors: tuple[str, ...] = ()
            async for rows in self.below(work.id):
                survivors += tuple(f"{row.id}." for row in rows if row_rules.survives(row))
                rows = [row for row in rows if not row.id.startswith(survivors)]
                live = [row.id for row in rows if not row.status.is_final]
                if live:
                    hit("cancel.between_pages")
                    has_changed = await self._cancel_all(live, work.reason) or has_changed

    @atomic
    async def _cancel_all(self, section: Section, ids: Sequence[str], reason: str) -> bool:
        step = self._step(section)
        step.ends.covers_below = True
        await step.read(ids)
        has_changed = False
        # Children first: a parent that has returned ends with its last child.
        for task_id in reversed(ids):
            row = step.live(task_id)
            if row is not None and not (row.cancel_requested or row_rules.survives(row)):
                self._cancel_row(step, row, reason)
                has_changed = True
        if has_changed:
            await step.commit()
        return has_changed

    # Events and groups

    async def complete(self, event_id: str, encoded: bytes) -> bool | None:
        """Give an event its value; False if it has ended, None if there is no such event."""
        is_first = await self._complete(event_id, encoded)
        await self._finish_work()
        return is_first

    @atomic
    async def _complete(self, section: Section, event_id: str, encoded: bytes) -> bool | None:
        step = self._step(section)
        records = await step.load([event_id])
        row = step.live(event_id)
        if row is None:
            return False if event_id in records else None
        if row.workflow is None or row.workflow.kind != "event":
            raise InvalidTask(f"{event_id} is not an event: only an event can be given a value")
        is_late = row.expires is not None and row.expires <= step.now
        finish = (
            row_rules.finish_cancelled(row, step.now, "expired")
            if is_late
            else row_rules.finish_event(row, step.now, encoded)
        )
        step.finish(row, finish)
        await step.commit()
        return not is_late

    async def close_group(self, group_id: str) -> bool:
        """Close a group to new members; False if it has ended."""
        is_live = await self._close_group(group_id)
        await self._finish_work()
        return is_live

    @atomic
    async def _close_group(self, section: Section, group_id: str) -> bool:
        step = self._step(section)
        await step.load([group_id])
        row = step.live(group_id)
        if row is None or row.workflow is None:
            return False
        if row.workflow.is_open:
            row.workflow = replace(row.workflow, is_open=False)
            step.update(row)
            step.ends.end_if_complete(row)
            await step.commit()
        return True

    # Reading

    async def records(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        """The records with these ids."""
        return await self._read(lambda section: section.load(list(ids), bodies=bodies))

    # Retry

    async def revive(self, root_id: str, ids: Sequence[str]) -> bool:
        """Make ended records below a root live again, each waiting for its sources that have not succeeded.

        An ended root is made live too. Returns False, and changes nothing, if the root is missing, or one of the
        others is live or missing.
        """
        parts = [ids[at : at + MAX_REVIVED] for at in range(0, len(ids), MAX_REVIVED)] or [[]]
        for part in parts[1:]:
            found = await self.records(part)
            if len(found) < len(part) or any(record.is_live for record in found.values()):
                return False
        for part in parts:
            # After the first part the flow is live: what others have made live in the others stays so.
            if not await self._revive(root_id, part, set(ids), must_all=part is parts[0]):
                return False
        self.has_work = True
        await self._finish_work()
        return True

    @atomic
    async def _revive(
        self,
        section: Section,
        root_id: str,
        ids: Sequence[str],
        revived: set[str],
        *,
        must_all: bool,
    ) -> bool:
        found = await section.load([root_id, *ids], bodies=True)
        root = found.get(root_id)
        ended = {each: record for each in ids if (record := found.get(each)) and not record.is_live}
        # A group is made live with its members.
        if root is None or (must_all and len(ended) < len(ids)):
            return False
        parents = {
            parent
            for record in ended.values()
            if (parent := (record.newest_row.workflow or Workflow()).parent) is not None
        }
        sources = {
            source
            for record in ended.values()
            for source in (record.newest_row.workflow or Workflow()).after
            + (record.newest_row.workflow or Workflow()).after_any
        }
        unread = [each for each in parents | sources if each not in found]
        found |= await section.load(unread, bodies=True)
        step = Revival(section, found, revived)
        await section.write(await step.changes(root_id, ended, parents))
        return True

    # Retention

    async def purge_results(self, before: int) -> int:
        """Delete the records of tasks that finished before that instant; returns how many.

        Records below others are deleted together with their root, and not before.
        """
        purged, kept = 0, 0
        query = FinishedQuery(by="finished_at", before=before - 1, limit=_BELOW)
        while ids := await self.page(query):
            deleted = await self._purge_page(ids, before)
            purged += deleted
            kept += len(ids) - deleted
            if len(ids) < query.limit:
                break
            # A backend may page by id, or return kept records again.
            query = replace(query, after=ids[-1], limit=_BELOW + kept)
        await self._finish_work()
        return purged

    @atomic
    async def _purge_page(self, section: Section, ids: Sequence[str], before: int) -> int:
        found = await section.load(ids)
        kept = {each for each, record in found.items() if _parent_of(record) is not None}
        deleted = [each for each in ids if each not in kept]
        documents = [
            work_change(FlowWork(action="purge", id=each), section.now)
            for each in deleted
            if each in found and (found[each].newest_row.workflow or Workflow()).size
        ]
        self.has_work = self.has_work or bool(documents)
        if deleted:
            gone = [each for each in deleted if _is_deleted(found.get(each), before)]
            documents += await forgotten(section, deleted, gone)
            changes = Changes(deleted_finished=deleted, finished_before=before, documents=documents)
            await section.write(changes)
        return len(deleted)

    async def delete_task(self, task_id: str) -> bool:
        """Delete the record of an ended task, and the records below it; False if there is none.

        A record below another is not deleted before that one.
        """
        is_deleted = await self._delete_task(task_id)
        await self._finish_work()
        return is_deleted

    @atomic
    async def _delete_task(self, section: Section, task_id: str) -> bool:
        record = await section.record(task_id)
        if record is None or record.finished is None or _parent_of(record) is not None:
            return False
        documents: list[DocumentChange] = []
        if (record.newest_row.workflow or Workflow()).size:
            documents = [work_change(FlowWork(action="purge", id=task_id), section.now)]
            self.has_work = True
        gone = [task_id] if record.letter is None else []
        documents += await forgotten(section, [task_id], gone)
        await section.write(Changes(deleted_finished=[task_id], documents=documents))
        return True

    async def _purge_below(self, root: str) -> bool:
        """Delete the records below one that has ended; False if some of them are live."""
        record = await self.record(root)
        if record is not None and record.is_live:
            # The root was retried, or another record has its id.
            return True
        ids: list[str] = []
        is_any_live = False
        async for rows in self.below(root):
            ids += [row.id for row in rows if row.status.is_final]
            is_any_live = is_any_live or any(not row.status.is_final for row in rows)
        if is_any_live:
            return False
        # In reverse order: a record is found through the records above it.
        for end in range(len(ids), 0, -_BELOW):
            await self._write(Changes(deleted_finished=ids[max(0, end - _BELOW) : end]))
        return True


class Revival:
    """The changes that make ended records live again."""

    def __init__(self, section: Section, found: dict[str, Record], revived: set[str]) -> None:
        self._section = section
        self._now = section.now
        self._found = found
        self._revived = revived
        self._inserted: dict[str, Row] = {}
        self._updated: dict[str, Row] = {}
        self._deleted: list[str] = []
        self._dead: list[str] = []
        self._documents: list[DocumentChange] = []

    async def changes(self, root_id: str, ended: dict[str, Record], parents: set[str]) -> Changes:
        """Make the ended records live, and those of their parents that have ended."""
        for task_id in dict.fromkeys((root_id, *parents, *ended)):
            record = self._found.get(task_id)
            if record is None or (task_id not in ended and not _is_group(record)):
                continue
            if record.is_live:
                self._updated[task_id] = record.row
                record.row.attached = True
            else:
                self._put_back(task_id, record)
        for task_id in ended:
            self._join(self._inserted[task_id])
        for parent_id in dict.fromkeys((root_id, *parents)):
            row = self._inserted.get(parent_id)
            if row is not None and parent_id not in ended and parent_id != root_id:
                # A group that is made live counts as a member of its parent again.
                self._join(row)
        self._connect(ended)
        sequences = Sequences(self._section, self)
        await sequences.rejoin(
            sorted(map(self._inserted.__getitem__, ended), key=attrgetter("seq"))
        )
        self._documents += sequences.changes()
        return Changes(
            inserted=list(self._inserted.values()),
            updated=list(self._updated.values()),
            documents=self._documents,
            deleted_finished=self._deleted,
            deleted_dead=self._dead,
        )

    async def read(self, ids: Iterable[str], /) -> None:
        """Read these rows, as far as they were not read yet."""
        unread = [each for each in dict.fromkeys(ids) if each not in self._found]
        self._found |= await self._section.load(unread)

    def live(self, task_id: str, /) -> Row | None:
        """A row that is made live, or was read and has not ended."""
        record = self._found.get(task_id)
        known = record.row if record is not None and record.is_live else None
        return self._inserted.get(task_id, known)

    def update(self, row: Row, /) -> None:
        """Write a row that lives already."""
        if row.id not in self._inserted:
            self._updated[row.id] = row

    def _put_back(self, task_id: str, record: Record) -> None:
        row = copy.copy(record.row)
        row_rules.retry_dead(row, self._now)
        row.workflow = row.workflow or Workflow()
        row_rules.put_back(row)
        row.attached = True
        if row.workflow.kind != "task":
            row_rules.hide(row, None)
        self._inserted[task_id] = row
        if record.finished is not None:
            self._deleted.append(task_id)
        if record.letter is not None:
            self._dead.append(task_id)
            self._documents.append(DocumentChange(HOOK, task_id, ANY, None))

    def _join(self, row: Row) -> None:
        parent_id = None if row.workflow is None else row.workflow.parent
        parent = self._inserted.get(parent_id or "") or self._updated.get(parent_id or "")
        if parent is None or parent.workflow is None:
            return
        row_rules.rejoin(parent, self._found[row.id].newest_row.status)

    def _connect(self, ended: dict[str, Record]) -> None:
        edges: dict[str, list[Edge]] = {}
        for task_id in ended:
            row = self._inserted[task_id]
            workflow = row.workflow or Workflow()
            unsettled: list[str] = []
            needs = 0
            for source in (*workflow.after, *workflow.after_any):
                edge = Edge(task_id, workflow.wait, source in workflow.after_any)
                record = self._found.get(source)
                if source in self._inserted:
                    edges.setdefault(source, []).append(edge)
                    needs += 1
                elif (
                    source in self._revived
                    or (record is not None and record.is_live)
                    or record is None
                    or (not edge.any_end and not _has_succeeded(record))
                ):
                    unsettled.append(source)
                    needs += 1
            row.workflow = replace(row.workflow or workflow, needs=needs)
            if needs:
                row_rules.hide(row, None)
            if unsettled:
                work = FlowWork(action="settle", id=task_id, sources=tuple(unsettled))
                self._documents.append(work_change(work, self._now))
        for source, added in edges.items():
            self._documents += add_edges(self._inserted[source], added)


def _is_group(record: Record) -> bool:
    workflow = record.newest_row.workflow
    return workflow is not None and workflow.kind == "group"


def _parent_of(record: Record) -> str | None:
    workflow = record.newest_row.workflow
    return None if workflow is None else workflow.parent


def _is_deleted(record: Record | None, before: int) -> bool:
    """Whether a purge of what finished before that instant leaves nothing of the record."""
    if record is None:
        return True
    finished = record.finished
    return record.letter is None and finished is not None and finished.finished_at < before


def _has_succeeded(record: Record) -> bool:
    finished: FinishedRow | None = record.finished
    return finished is not None and finished.row.status is TaskStatus.SUCCESS
