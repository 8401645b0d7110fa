"""Insertion of rows that are part of a workflow: their edges, and the changes of their parents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from omniq.errors import InvalidTask, StaleClaim
from omniq.models import TaskStatus
from omniq.storage import row_rules
from omniq.storage.backend import Changes, DocumentChange, Record, Section
from omniq.storage.release_dependents import FLOW_WORK, Edge, FlowWork, add_edges, work_change
from omniq.storage.row_rules import Row, Workflow
from omniq.storage.sequences import UNKNOWN, Sequences, key_of

MAX_SOURCES = 1_000
"""The most records that one task may wait for."""


_OPEN_FOR = 3_600_000_000
"""Microseconds for which the producer of a large flow may add to it."""


class Under(msgspec.Struct, frozen=True):
    """The claim of a running task: rows are inserted only while it is current."""

    owner: str
    task_id: str
    token: int


def ids_to_read(rows: Sequence[Row], under: Under | None) -> list[str]:
    """The ids that an insertion of these rows depends on: their own, their sources and their parents."""
    ids = dict.fromkeys(row.id for row in rows)
    for row in rows:
        if row.workflow is not None:
            ids |= dict.fromkeys((*row.workflow.after, *row.workflow.after_any))
            if row.workflow.parent is not None:
                ids[row.workflow.parent] = None
    if under is not None:
        ids[under.task_id] = None
    return list(ids)


def check_batch(rows: Sequence[Row]) -> None:
    """Refuse rows that cannot be inserted: cycles, repeating tasks, too many sources."""
    by_id = {row.id: row for row in rows}
    for row in rows:
        workflow = row.workflow
        if workflow is None:
            continue
        sources = (*workflow.after, *workflow.after_any)
        if len(sources) > MAX_SOURCES:
            raise InvalidTask(
                f"task {row.id}: it waits for {len(sources):,} others; {MAX_SOURCES:,} is the maximum: "
                "put them into a group, and wait for that"
            )
        if len(set(sources)) < len(sources):
            raise InvalidTask(f"task {row.id}: it waits for the same task twice")
        if row.repeats and (sources or workflow.parent):
            raise InvalidTask(f"task {row.id}: a repeating task cannot be part of a workflow")
        if row.repeats and workflow.sequence is not None:
            raise InvalidTask(
                f"task {row.id}: a repeating task never ends, so it cannot be part of a sequence; "
                "use a schedule, which enqueues a task for each time"
            )
        for source in sources:
            if source == row.id or (
                row.id.startswith(f"{source}.") and _is_above(source, row, by_id)
            ):
                raise InvalidTask(f"task {row.id}: it waits for {source}, which ends only after it")
    _check_circles(by_id)


def _is_above(source: str, row: Row, by_id: Mapping[str, Row]) -> bool:
    """Whether the source is a record that the row belongs to."""
    parent = None if row.workflow is None else row.workflow.parent
    while parent is not None:
        if parent == source:
            return True
        above = by_id.get(parent)
        if above is None:
            return parent.startswith(f"{source}.")
        parent = None if above.workflow is None else above.workflow.parent
    return False


def _check_circles(by_id: Mapping[str, Row]) -> None:
    """Raise `InvalidTask` with the path of a cycle among the rows."""
    before = _before_in_sequence(by_id)
    done: set[str] = set()
    for first in by_id:
        path: dict[str, None] = {}
        stack = [(first, False)]
        while stack:
            task_id, is_left = stack.pop()
            if is_left:
                path.pop(task_id)
                done.add(task_id)
                continue
            if task_id in path:
                around = [*list(path)[list(path).index(task_id) :], task_id]
                raise InvalidTask(f"tasks that wait for one another: {' -> '.join(around)}")
            row = by_id.get(task_id)
            if row is None or task_id in done or row.workflow is None:
                continue
            path[task_id] = None
            stack.append((task_id, True))
            sources = *row.workflow.after, *row.workflow.after_any, *before.get(task_id, ())
            stack += [(each, False) for each in sources]


def _before_in_sequence(by_id: Mapping[str, Row]) -> dict[str, tuple[str, ...]]:
    """The row of the batch that each row of a sequence waits for."""
    before: dict[str, tuple[str, ...]] = {}
    last: dict[str, str] = {}
    for row in by_id.values():
        key = key_of(row)
        if key is not None:
            before[row.id] = (last[key],) if key in last else ()
            last[key] = row.id
    return before


class FlowInsertion:
    """Adds the edges and the changed parents to an insertion."""

    _section: Section
    _key_above: str | None = None
    """The sequence of the running task whose claim the rows are inserted under."""

    def __init__(self, changes: Changes, known: Mapping[str, Record], now: int) -> None:
        self._changes = changes
        self._known = dict(known)
        self._now = now
        self._fresh = {row.id: row for row in changes.inserted}
        self._updated: dict[str, Row] = {}
        self._edges: dict[str, list[Edge]] = {}

    def plan(self, under: Under | None, *, in_transaction: bool) -> None:
        """Refuse rows that cannot be inserted, and add the documents and the rows that change."""
        if under is not None:
            self._check_claim(under)
        for row in self._changes.inserted:
            if row.workflow is not None:
                self._join(row, in_transaction)
                self._wait(row, in_transaction)
        documents: list[DocumentChange] = []
        for source, edges in self._edges.items():
            row = self._fresh.get(source) or self._change(source)
            documents += add_edges(row, edges)
        self._changes.documents += documents
        self._changes.updated = list(self._updated.values())

    async def join_sequences(self, section: Section, *, in_transaction: bool) -> None:
        """Add the rows behind all others of their sequences."""
        rows = [row for row in self._changes.inserted if key_of(row) is not None]
        if in_transaction and rows:
            # The last of them may be running: its row must not be locked until the caller commits.
            for row in rows:
                row_rules.follow(row, UNKNOWN)
            ids = tuple(row.id for row in rows)
            self._add_work(FlowWork(action="join", id=ids[0], sources=ids))
        elif rows:
            self._section = section
            sequences = Sequences(section, self)
            await sequences.join(rows)
            self._changes.documents += sequences.changes()
            self._changes.updated = list(self._updated.values())

    async def read(self, ids: Iterable[str], /) -> None:
        """Read these rows, as far as they were not read yet."""
        unread = [each for each in dict.fromkeys(ids) if each not in self._known]
        if unread:
            self._known |= await self._section.load(unread)

    def live(self, task_id: str, /) -> Row | None:
        """A row that is new, or was read and has not ended."""
        record = self._known.get(task_id)
        return record.row if record is not None and record.is_live else None

    def update(self, row: Row, /) -> None:
        """Write a row that was stored before."""
        self._updated[row.id] = row
        self._changes.checked = [each for each in self._changes.checked if each.id != row.id]

    def _check_claim(self, under: Under) -> None:
        record = self._known.get(under.task_id)
        row = None if record is None or not record.is_live else record.row
        if row is None or (row.owner, row.token) != (under.owner, under.token):
            raise StaleClaim(under.task_id, under.token)
        self._key_above = key_of(row)
        if under.task_id not in self._updated:
            self._changes.checked = [row]

    def _change(self, task_id: str) -> Row:
        """A stored row, to be changed. Its outcome is then recorded by the rules, not by a fast path."""
        row = self._known[task_id].row
        row.attached = True
        self.update(row)
        return row

    def _join(self, row: Row, in_transaction: bool) -> None:
        assert row.workflow is not None
        parent_id, kind = row.workflow.parent, row.workflow.kind
        if kind == "group" and not row.workflow.is_open and not self._has_members(row.id):
            self._add_work(FlowWork(action="settle", id=row.id))
        if kind == "event" and row.expires is not None:
            self._add_work(FlowWork(action="expire", id=row.id), row.expires)
        elif row.workflow.is_open and parent_id is None:
            reason = "its producer died before all parts of the flow were stored"
            work = FlowWork(action="expire", id=row.id, reason=reason)
            self._add_work(work, self._now + _OPEN_FOR)
        if parent_id is None:
            return
        parent = self._fresh.get(parent_id)
        if parent is None:
            record = self._known.get(parent_id)
            if record is None or not record.is_live or in_transaction:
                raise InvalidTask(f"task {row.id}: its parent {parent_id} is not live")
            if record.row.cancel_requested:
                raise InvalidTask(f"task {row.id}: its parent {parent_id} is cancelled")
            parent = self._change(parent_id)
        workflow = parent.workflow or Workflow()
        if key_of(row) is not None and key_of(row) in (workflow.sequence, self._key_above):
            raise InvalidTask(
                f"task {row.id}: it is in the sequence of its parent {parent_id}, which ends only after it; "
                "enqueue it without waiting for it, or give it another sequence"
            )
        if workflow.is_stopped:
            raise InvalidTask(f"task {row.id}: its parent {parent_id} is cancelled")
        parent.workflow = replace(
            workflow, members=workflow.members + (kind != "event"), size=workflow.size + 1
        )

    def _has_members(self, group: str) -> bool:
        return any(
            row.workflow is not None
            and row.workflow.parent == group
            and row.workflow.kind != "event"
            for row in self._changes.inserted
        )

    def _wait(self, row: Row, in_transaction: bool) -> None:
        workflow = row.workflow
        assert workflow is not None
        unsettled: list[str] = []
        satisfied = 0
        for source in (*workflow.after, *workflow.after_any):
            edge = Edge(row.id, 0, source in workflow.after_any)
            if source in self._fresh:
                self._edges.setdefault(source, []).append(edge)
                continue
            record = self._known.get(source)
            if record is None:
                raise InvalidTask(
                    f"task {row.id}: it waits for {source}, which has no record; a record is kept for the "
                    "result_ttl of its task"
                )
            if record.row.repeats:
                raise InvalidTask(
                    f"task {row.id}: it waits for {source}, which repeats and never ends"
                )
            if record.is_live and not in_transaction:
                self._edges.setdefault(source, []).append(edge)
            elif not record.is_live and (edge.any_end or _has_succeeded(record)):
                satisfied += 1
            else:
                unsettled.append(source)
        if unsettled:
            self._add_work(FlowWork(action="settle", id=row.id, sources=tuple(unsettled)))
        if satisfied:
            row.workflow = replace(row.workflow or workflow, needs=workflow.needs - satisfied)
            if row.workflow.needs == 0 and workflow.kind == "task":
                if row.fair is not None or row.lead:
                    row_rules.set_due(row, workflow.eta or self._now)
                else:
                    row.due = row.turn = self._now if row.turn is None else row.turn
                row.visible = workflow.eta or 0

    def _add_work(self, work: FlowWork, due: int | None = None) -> None:
        self._changes.documents.append(work_change(work, self._now if due is None else due))

    @property
    def has_work(self) -> bool:
        """Whether work remains after the rows are stored."""
        return any(change.kind == FLOW_WORK for change in self._changes.documents)


def _has_succeeded(record: Record) -> bool:
    return record.finished is not None and record.finished.row.status is TaskStatus.SUCCESS
