"""Encoding: rows as columns of the tables, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from omniq.clock import to_micros
from omniq.gate_rules import Gate
from omniq.models import Attempt, DeadLetter, TaskStatus
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.row_rules import FinishedRow, Row

STATUSES = tuple(TaskStatus)
"""The statuses, indexed by their numbers in the tables."""

STATUS_NUMBERS = {status: number for number, status in enumerate(STATUSES)}

_decode_gates = lenient_decoder(tuple[Gate, ...], None)
_decode_history = lenient_decoder(tuple[Attempt, ...], ())

_SHARED_COLUMNS = (
    "id, seq, nonce, queue, rank, func_path, due, visible, created_at, status, attempts, crashes, "
    "releases, token, settled, started_at, cancel_requested, repeats, unique_key, expires, "
    "result_ttl, gates, history, "
)
LIVE_COLUMNS = f"{_SHARED_COLUMNS} body, owner, parked, attached"
LIVE_COLUMNS_WITHOUT_BODY = f"{_SHARED_COLUMNS} ''::bytea AS body, owner, parked, attached"
ENDED_COLUMNS = (
    f"{_SHARED_COLUMNS} body, NULL::text AS owner, NULL::text AS parked, false AS attached"
)
"""The columns that `stored_row` expects: of `live`, and of `finished` and `dead`."""


class StoredRow(msgspec.Struct, frozen=True):
    """A row, and whether it may have side data that must be deleted when the task ends."""

    row: Row
    attached: bool


def stored_row(record: Sequence[Any]) -> StoredRow:
    """Build the row from the columns above. More columns may follow them."""
    (
        task_id, seq, nonce, queue, rank, func_path, due, visible, created_at, status, attempts,
        crashes, releases, token, settled, started_at, cancel_requested, repeats, unique, expires,
        result_ttl, gates, history, body, owner, parked, attached, *_,
    ) = record  # fmt: skip
    limits = _decode_gates(gates) if gates else ()
    row = Row(
        id=task_id,
        seq=seq,
        nonce=nonce,
        queue=queue,
        priority=~rank,
        func_path=func_path,
        # A task whose limits cannot be decoded must not run: without a body it cannot.
        body=b"" if limits is None else body,
        due=due,
        visible=visible,
        created_at=created_at,
        status=STATUSES[status],
        attempts=attempts,
        crashes=crashes,
        releases=releases,
        token=token,
        settled=settled,
        owner=owner,
        started_at=started_at,
        cancel_requested=cancel_requested,
        repeats=repeats,
        unique=unique,
        expires=expires,
        result_ttl=result_ttl,
        gates=limits or (),
        parked=parked,
        history=_decode_history(history) if history else (),
    )
    return StoredRow(row, attached)


def claimed_row(record: Sequence[Any], owner: str) -> Row:
    """Build a row that the fast path has claimed: the fields that a run and its outcome need."""
    (
        _, _, _, _, task_id, seq, queue, rank, func_path, body, due, visible, attempts, crashes,
        releases, token, started_at, cancel_requested, repeats, expires, history,
    ) = record  # fmt: skip
    return Row(
        id=task_id,
        seq=seq,
        queue=queue,
        priority=~rank,
        func_path=func_path,
        body=body,
        due=due,
        visible=visible,
        created_at=0,
        status=TaskStatus.RUNNING,
        attempts=attempts,
        crashes=crashes,
        releases=releases,
        token=token,
        owner=owner,
        started_at=started_at,
        cancel_requested=cancel_requested,
        repeats=repeats,
        expires=expires,
        history=_decode_history(history) if history else (),
    )


def encode_history(row: Row) -> bytes | None:
    """The value of the column `history`."""
    return encode_internal(row.history) if row.history else None


def to_columns(lines: Iterable[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """Transpose lines into columns, for parameters that are arrays.

    >>> to_columns([(1, "a"), (2, "b")], 2)
    [[1, 2], ['a', 'b']]
    """
    columns = [list(column) for column in zip(*lines, strict=True)]
    return columns or [[] for _ in range(width)]


def save_line(row: Row, attached: bool, claim_id: str | None) -> tuple[Any, ...]:
    """The values for one task in a call of the SQL function `save`."""
    return (
        row.id, row.due, row.visible, STATUS_NUMBERS[row.status], row.attempts, row.crashes,
        row.releases, row.token, row.settled, row.owner, row.started_at, row.cancel_requested,
        row.parked, _lot(row), attached, encode_history(row), claim_id,
    )  # fmt: skip


def finish_line(finished: FinishedRow, letter: DeadLetter | None) -> tuple[Any, ...]:
    """The values for one task in a call of the SQL function `finish`."""
    row = finished.row
    dead: tuple[bytes | None, int | None, str | None] = (None, None, None)
    if letter is not None:
        dead = (encode_internal(letter), to_micros(letter.last_failure), letter.failure_reason)
    return (
        row.id, STATUS_NUMBERS[row.status], row.attempts, row.crashes, row.settled,
        encode_history(row), finished.result, *dead,
    )  # fmt: skip


def _lot(row: Row) -> str | None:
    # The name of a queue contains no slash.
    return None if row.parked is None else f"{row.is_suspect:d}/{row.queue}/{row.parked}"
