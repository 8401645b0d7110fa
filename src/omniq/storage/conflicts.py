"""What an enqueue does when another task holds its unique key: it replaces or extends that one, or waits for it.

The holder that has not begun keeps its id and its options. A holder that runs lets go of the key: the new task
waits for its end, and is the one that later calls replace. So at most one runs and one waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from omniq.clock import from_micros
from omniq.errors import InvalidTask, KeyNeeded, SerializationError
from omniq.models import Task
from omniq.serialization import Serializer
from omniq.signing import has_seal
from omniq.storage import row_rules
from omniq.storage.backend import Record, Section
from omniq.storage.row_rules import FORMAT, Row, Workflow, check_body
from omniq.storage.row_seals import RowSeals

_REMEMBERED = 8
"""The calls that a holder remembers to have applied: a repeat of one, whose reply was lost, changes nothing."""


class Conflicts:
    """Settles the conflicts of one enqueue, in the order of its tasks."""

    def __init__(
        self,
        held: Mapping[str, Record],
        now: int,
        serializer: Serializer,
        seals: RowSeals | None,
    ) -> None:
        self.held = held
        """The live holders of unique keys, with their bodies."""
        self.edited: dict[str, Row] = {}
        """Those of them that have changed."""
        self._now = now
        self._serializer = serializer
        self._seals = seals

    def is_settled(self, given: Row, holder_id: str, fresh: Mapping[str, Row]) -> bool:
        """Whether the holder stands for the given row now; if not, that one waits for its end.

        `fresh` are the rows that this enqueue inserts.
        """
        new = fresh.get(holder_id)
        record = self.held.get(holder_id)
        row = new or (None if record is None else self.edited.get(holder_id, record.row))
        if row is None or (row.workflow is not None and row.workflow.kind != "task"):
            # It has ended and still holds its key, or is a flow.
            return True
        if row.repeats:
            raise InvalidTask(
                f"task {given.id}: its unique key is held by {row.id}, which repeats; change or cancel that one"
            )
        if _has_begun(row):
            return given.on_conflict == "extend"
        call = f"{given.nonce}/{given.id}"
        if new is None and call in row.replaced:
            return True
        self._edit(row, given)
        if new is None:
            row.replaced = (*row.replaced, call)[-_REMEMBERED:]
            self.edited[row.id] = row
        return True

    def _edit(self, row: Row, given: Row) -> None:
        stored, new = self._task_in(row), self._task_in(given)
        if given.on_conflict == "replace":
            if row.func_path != given.func_path:
                raise InvalidTask(
                    f"task {given.id}: its unique key is held by {row.id} of {row.func_path}; another function "
                    "cannot replace it: use another key"
                )
            stored = msgspec.structs.replace(
                stored,
                args=new.args,
                kwargs=new.kwargs,
                secrets=new.secrets,
                version=new.version,
                metadata=new.metadata,
            )
            row_rules.forget_failures(row, self._now)
        eta = given.visible
        if given.max_wait is not None and eta:
            since = row.stored_at if row.waits_since is None else row.waits_since
            eta = min(eta, since + given.max_wait)
        stored = msgspec.structs.replace(stored, eta=from_micros(eta) if eta else None)
        body = self._serializer.encode_task(stored)
        row_rules.change_waiting(row, stored, body, self._now, due=True)

    def _task_in(self, row: Row) -> Task:
        if row.format > FORMAT:
            raise SerializationError(
                f"task {row.id}: a newer omniq has stored it; replace it with that version"
            )
        if self._seals is None and has_seal(row.body):
            raise KeyNeeded(f"task {row.id}")
        task = self._serializer.decode_task(row.body)
        if self._seals is None:
            check_body(row, task)
        else:
            self._seals.check_row(row, task)
        return task


def _has_begun(row: Row) -> bool:
    """Whether a worker holds the task, or it waits in the middle of a run."""
    has_run = row.workflow is not None and (row.workflow.has_run or row.workflow.result is not None)
    return row.owner is not None or has_run


def wait_for_end(row: Row, holder_id: str) -> None:
    """Have a new row wait for the end of the task that holds its key, in whatever way that ends."""
    workflow = row.workflow or Workflow(eta=row.visible or None)
    after_any = (*workflow.after_any, holder_id)
    row.workflow = msgspec.structs.replace(workflow, after_any=after_any, needs=workflow.needs + 1)
    row_rules.hide(row, row.expires)


async def read_conflicts(
    section: Section,
    rows: Sequence[Row],
    holders: Mapping[str, str],
    serializer: Serializer,
    seals: RowSeals | None,
) -> Conflicts | None:
    """Read the holders of the unique keys of these rows; None if every row keeps its holder."""
    asking = [row for row in rows if row.on_conflict is not None]
    if not asking:
        return None
    ids = {holders[row.unique] for row in asking if row.unique and row.unique in holders}
    found = await section.load(sorted(ids), bodies=True) if ids else {}
    held = {task_id: record for task_id, record in found.items() if record.is_live}
    return Conflicts(held, section.now, serializer, seals)
