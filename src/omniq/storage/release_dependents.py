"""The effects of the end of a record on other records, in the step that ends it.

When a record ends, its parent counts it as ended, and a group ends with its last member. A record that waits for
it is released if it needs no other source, and ends as CANCELLED if its wait can never be satisfied; that end has
the same effects. Edges are documents: each lists some of the records that wait for one source, and the source's
row has the number of these documents. Every new edge therefore changes the row of its source, and a concurrent step
that ends the source is repeated.

A step processes about `MAX_RELEASED` edges. For the rest it stores a document of the kind `flow_work`, and the
next turns of this owner, or the maintenance of any worker, process it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from omniq.failpoints import hit
from omniq.models import TaskStatus
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage import row_rules
from omniq.storage.backend import ANY, Document, DocumentChange
from omniq.storage.row_rules import Row, Workflow
from omniq.storage.sequences import Sequences, key_of

if TYPE_CHECKING:
    from omniq.storage.step import Step

EDGES, FLOW_WORK = "edges", "flow_work"
"""The kinds of the documents with edges, and of those with remaining work."""

MAX_RELEASED = 300
"""About the number of edges that one step processes."""

EDGES_IN_DOCUMENT = 100
_DOCUMENTS_READ = 50

_SUCCESS = TaskStatus.SUCCESS


class Edge(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record that waits for a source. `wait`: the number of its wait.

    With `any_end` it waits for any end, otherwise for success.
    """

    waiter: str
    wait: int
    any_end: bool = False


class FlowWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Remaining work for a record, to be done at the `due` of its document.

    `release`: it has ended with `status`, and the documents with its edges from number `first` up to `edges` remain;
    `of` begins their keys. `settle`: it waits for `sources`, but the edges are not stored yet. `cancel` and `purge`:
    cancel or delete all records below it. `expire`: end it if it has not ended. `join`: it and the others of `sources`
    were enqueued in a caller's transaction, and are not in their sequences yet.
    """

    action: Literal["release", "settle", "cancel", "expire", "purge", "join"]
    id: str
    of: str = ""
    status: TaskStatus = TaskStatus.SUCCESS
    first: int = 0
    edges: int = 0
    sources: tuple[str, ...] = ()
    reason: str = ""

    @property
    def key(self) -> str:
        """The key of its document."""
        return f"{self.action}/{self.of or self.id}"


_Edges = list[Edge]
decode_edges = lenient_decoder(_Edges, None)
decode_work = lenient_decoder(FlowWork, None)


def edges_of(row: Row) -> str:
    """The beginning of the keys of a row's edges. It is unique even if the id is used again."""
    return f"{row.id}/{row.stored_at}"


def work_change(work: FlowWork, due: int, before: bytes | None = ANY) -> DocumentChange:
    """The change that stores remaining work."""
    return DocumentChange(FLOW_WORK, work.key, before, encode_internal(work), due)


def add_edges(row: Row, edges: list[Edge]) -> Iterable[DocumentChange]:
    """Add edges from the row; the caller stores the row."""
    row.workflow = row.workflow or Workflow()
    for start in range(0, len(edges), EDGES_IN_DOCUMENT):
        number = row.workflow.edges
        row.workflow = replace(row.workflow, edges=number + 1)
        data = encode_internal(edges[start : start + EDGES_IN_DOCUMENT])
        yield DocumentChange(EDGES, f"{edges_of(row)}/{number}", ANY, data)


class Ends:
    """The records that end, and begin to wait, in one step."""

    def __init__(self, step: Step, note_work: Callable[[], None]) -> None:
        self._step = step
        self._note_work = note_work
        self._ended: list[Row] = []
        self._waits: list[tuple[Row, tuple[str, ...]]] = []
        self._sources: list[FlowWork] = []
        self._edges: dict[str, DocumentChange] = {}
        self._work: dict[str, DocumentChange] = {}
        self._moves = 0
        self.sequences = Sequences(step.section, step)
        self.covers_below = False
        """Whether the step is one of several that cancel all records below another."""
        self.has_released = False
        self.has_ended = False
        """Whether records of workflows have become claimable, or have ended."""

    # What the step adds

    def add(self, row: Row) -> None:
        """Add a row with a workflow that has ended."""
        self._ended.append(row)
        self.has_ended = True

    def begin_wait(self, row: Row, sources: tuple[str, ...]) -> None:
        """Let a row wait for those of these records that have not ended. The row counts all of them as needed."""
        self._waits.append((row, sources))

    async def join_sequences(self, ids: tuple[str, ...]) -> None:
        """Add rows that were enqueued in a caller's transaction to their sequences."""
        await self._step.read(ids)
        rows = [row for each in ids if (row := self._step.live(each)) is not None]
        await self.sequences.join(rows)
        for row in rows:
            if not row_rules.is_waiting(row):
                row_rules.make_claimable(row, self._step.now)
                self.has_released = True
            self._step.update(row)

    def resume(self, document: Document, work: FlowWork | None) -> None:
        """Delete the document, and release the records that wait for its source, if it has one."""
        self._work[document.key] = DocumentChange(FLOW_WORK, document.key, document.data, None)
        if work is not None:
            self._sources.append(work)

    def put_work(self, work: FlowWork, due: int) -> None:
        """Store remaining work."""
        known = self._work.get(work.key)
        self._work[work.key] = work_change(work, due, ANY if known is None else known.before)
        if due <= self._step.now:
            self._note_work()

    # Applying

    async def apply(self) -> None:
        """Apply all ends, up to the limit of one step."""
        while self._ended or self._waits or self._sources:
            if self._ended:
                await self._leave_parents()
            elif self._waits:
                await self._connect()
            elif self._moves >= MAX_RELEASED:
                for work in self._sources:
                    self.put_work(work, self._step.now)
                self._sources = []
            else:
                await self._release()

    def changes(self) -> list[DocumentChange]:
        """The documents that have changed."""
        return [*self._edges.values(), *self._work.values(), *self.sequences.changes()]

    async def _leave_parents(self) -> None:
        ended, self._ended = self._ended, []
        if [row for row in ended if key_of(row) is not None]:
            dead = frozenset(row.id for row in ended if self._step.is_dead(row.id))
            await self.sequences.leave(ended, dead)
            self.has_released = self.has_released or bool(self.sequences.released)
        step, parents = self._step, [row.workflow.parent for row in ended if row.workflow]
        await step.read([parent for parent in parents if parent is not None])
        for row, parent_id in zip(ended, parents, strict=True):
            workflow = row.workflow
            assert workflow is not None
            parent = None if parent_id is None else step.live(parent_id)
            if parent is not None and workflow.kind != "event":
                self._leave(parent, row)
            if workflow.edges > workflow.edges_done:
                work = FlowWork(
                    action="release",
                    id=row.id,
                    of=edges_of(row),
                    status=row.status,
                    first=workflow.edges_done,
                    edges=workflow.edges,
                )
                self._sources.append(work)
            if workflow.size and workflow.kind == "task" and not self.covers_below:
                reason = f"{row.id} has ended"
                self.put_work(FlowWork(action="cancel", id=row.id, reason=reason), step.now)
            if workflow.size and parent_id is None:
                expires_at = step.now + row.result_ttl
                self.put_work(FlowWork(action="purge", id=row.id), expires_at)

    def _leave(self, parent: Row, row: Row) -> None:
        """Count the end of a member."""
        workflow, step = parent.workflow or Workflow(), self._step
        has_failed = row.status is not _SUCCESS
        stops = has_failed and workflow.stops and not workflow.is_stopped
        is_group = workflow.kind == "group"
        parent.workflow = workflow = replace(
            workflow,
            members=workflow.members - 1,
            failed=workflow.failed + (has_failed and is_group),
            is_stopped=workflow.is_stopped or stops,
        )
        if stops and not parent.cancel_requested:
            reason = f"{row.id} did not succeed"
            self.put_work(FlowWork(action="cancel", id=parent.id, reason=reason), step.now)
        parent.attached = True
        step.update(parent)
        self.end_if_complete(parent)

    def end_if_complete(self, row: Row) -> None:
        """End a group without live members, or a task that has returned and has no live children."""
        workflow = row.workflow
        if workflow is None or workflow.members:
            return
        if workflow.is_open and not row.cancel_requested:
            return
        if workflow.kind == "group":
            self._step.finish(row, row_rules.finish_group(row, self._step.now))
        elif workflow.result is not None:
            self._step.finish(row, row_rules.finish_returned(row, self._step.now))

    async def _connect(self) -> None:
        """Add the edges of new waits, and count sources that have already ended."""
        waits, self._waits = self._waits, []
        step = self._step
        ended = await step.read(chain.from_iterable(sources for _, sources in waits))
        edges: dict[str, list[Edge]] = {}
        for row, sources in waits:
            workflow = row.workflow
            assert workflow is not None
            for source in sources:
                any_end = source in workflow.on or source in workflow.after_any
                edge = Edge(row.id, workflow.wait, any_end)
                if step.live(source) is not None:
                    edges.setdefault(source, []).append(edge)
                elif step.live(row.id) is not None:
                    # If the source has no record any more, only its end is known, not its status.
                    self._satisfy(source, ended.get(source, TaskStatus.CANCELLED), edge)
        for source, added in edges.items():
            row_of_source = step.live(source)
            assert row_of_source is not None
            row_of_source.attached = True
            for change in add_edges(row_of_source, added):
                self._edges[change.key] = change
            step.update(row_of_source)

    async def _release(self) -> None:
        """Process the next edges of the sources that have ended."""
        keys = list(
            islice(
                (
                    f"{work.of}/{number}"
                    for work in self._sources
                    for number in range(work.first, work.edges)
                ),
                _DOCUMENTS_READ,
            )
        )
        stored = await self._step.section.documents(EDGES, keys)
        found: list[tuple[FlowWork, Edge]] = []
        for key in keys:
            if self._moves >= MAX_RELEASED:
                break
            work = self._sources[0]
            known = self._edges.get(key)
            data = known.after if known is not None else stored[key].data if key in stored else None
            edges = (decode_edges(data) or []) if data else []
            found += [(work, edge) for edge in edges]
            self._moves += len(edges)
            self._edges[key] = DocumentChange(EDGES, key, ANY, None)
            self._sources[0] = work = replace(work, first=work.first + 1)
            if work.first >= work.edges:
                del self._sources[0]
        hit("release.before")
        await self._step.read(edge.waiter for _, edge in found)
        for work, edge in found:
            self._satisfy(work.id, work.status, edge)

    def _satisfy(self, source: str, status: TaskStatus, edge: Edge) -> None:
        """Apply the end of a source to a waiting record."""
        step = self._step
        row = step.live(edge.waiter)
        workflow = None if row is None else row.workflow
        if row is None or workflow is None or workflow.wait != edge.wait or row.owner is not None:
            # The edge belongs to an earlier wait.
            return
        if status is _SUCCESS or edge.any_end:
            row.workflow = replace(workflow, needs=workflow.needs - 1)
            if not row_rules.is_waiting(row):
                row_rules.make_claimable(row, step.now)
                self.has_released = True
            step.update(row)
            return
        row.workflow = replace(workflow, failed=workflow.failed + 1)
        if workflow.failed < workflow.holds:
            step.update(row)
            return
        how = "failed" if status is TaskStatus.FAILED else "was cancelled"
        reason = f"needs {source}, which {how}"
        step.finish(row, row_rules.finish_cancelled(row, step.now, reason))
