"""Row names: a live task's row is its record together with what its name says.

Claims, parking, the return of a parked task, cancellation requests and the mark of attached documents
are only in the name, so that they cost one rename and write no file.
"""

from __future__ import annotations

from omniq.models import TaskStatus
from omniq.storage.file.encoding import NotARecord
from omniq.storage.file.file_names import RowName
from omniq.storage.row_rules import Row, copy_of


def row_of(name: RowName, record: Row) -> Row:
    """The row of the task with that name and record."""
    row = copy_of(record)
    row.attached = row.attached or "a" in name.marks
    row.cancel_requested = row.cancel_requested or "c" in name.marks
    if name.owner:
        if record.owner is None and record.token < name.token:
            row.status = TaskStatus.RUNNING
            row.owner, row.token, row.started_at = name.owner, name.token, name.started
        if (row.owner, row.token) != (name.owner, name.token):
            raise NotARecord("the record is not of the claim in its name")
        row.parked = None
    else:
        try:
            row.parked = None if name.parked is None else row.gates[name.parked].key
        except IndexError:
            raise NotARecord("the record has no gate of the number in its name") from None
    return row


def first_name(row: Row, content: str) -> RowName:
    """The name of a row whose record is written to that content."""
    return RowName(row.id, content, 0, "", _gate_number(row), *_claim(row))


def next_name(before: RowName, record: Row, row: Row) -> RowName | None:
    """The name that turns the record into the row; None if the row needs a new record."""
    marks = ("a" if row.attached else "") + ("c" if row.cancel_requested else "")
    name = RowName(
        row.id,
        before.content,
        before.version + 1,
        marks,
        _gate_number(row),
        *_claim(row),
    )
    try:
        same = row_of(name, record)
    except NotARecord:
        return None
    # The row may have been read without its body.
    same.body = row.body
    return name if same == row else None


def _gate_number(row: Row) -> int | None:
    if row.parked is None:
        return None
    return next(number for number, gate in enumerate(row.gates) if gate.key == row.parked)


def _claim(row: Row) -> tuple[int, str, int]:
    return (0, "", 0) if row.owner is None else (row.token, row.owner, row.started_at)
