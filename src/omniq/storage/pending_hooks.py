"""Pending hooks: the calls of `on_dead` that are recorded with a dead letter until they are made.

A document beside the dead letter, written in the same step, says that the hook is still to be called, and
by which worker. It is deleted when the call has ended. If that worker is lost first, or if none was named,
any worker that has the function takes it over: the hook is called at least once.
"""

from __future__ import annotations

import msgspec

from omniq import signing
from omniq.clock import from_micros
from omniq.errors import SerializationError
from omniq.models import TaskError
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.signing import is_sealed, open_document, seal_document
from omniq.storage.backend import ANY, Document, DocumentChange
from omniq.storage.row_rules import LOST, Finish, Row
from omniq.storage.types import PendingHook

HOOK = "hook"
"""The kind of these documents. The key is the id of the task."""


class _Stored(msgspec.Struct, array_like=True):
    owner: str
    token: int
    died_at: int
    func_path: str
    queue: str
    reason: str
    error: TaskError | None
    lost: int = 0


_decode = internal_decoder(_Stored)


def pending_hook(serializer: Serializer, row: Row, finish: Finish, now: int) -> DocumentChange:
    """The document of a hook that is to be called because the row became a dead letter."""
    error = finish.result.error
    if is_sealed(serializer) and error is not None and error.error_type == LOST:
        # It names the owner in the row, which is not signed.
        error = TaskError("its worker was lost", error_type=LOST, timestamp=error.timestamp)
    stored = _Stored(
        owner=finish.hook or "",
        token=row.token,
        died_at=now,
        func_path=row.func_path,
        queue=row.queue,
        reason=finish.result.reason or "",
        error=error,
    )
    return _change(serializer, row.id, stored, ANY)


def taken_over(serializer: Serializer, document: Document, owner: str) -> DocumentChange:
    """The change by which that owner is the one that calls the hook. An earlier one was lost."""
    stored = _open(serializer, document)
    if stored.owner and stored.owner != owner:
        stored.lost += 1
    stored.owner = owner
    return _change(serializer, document.key, stored, document.data)


def read_hook(serializer: Serializer, document: Document) -> PendingHook | None:
    """The pending hook; None for a document that cannot be read or verified."""
    try:
        stored = _open(serializer, document)
        died_at = from_micros(stored.died_at)
    except (SerializationError, OverflowError):
        return None
    return PendingHook(
        task_id=document.key,
        func_path=stored.func_path,
        queue=stored.queue,
        owner=stored.owner,
        token=stored.token,
        died_at=died_at,
        reason=stored.reason,
        error=stored.error or TaskError("unknown"),
        lost=stored.lost,
    )


def _open(serializer: Serializer, document: Document) -> _Stored:
    return _decode(open_document(serializer, signing.HOOK, document.data, document.key))


def _change(serializer: Serializer, task_id: str, stored: _Stored, before: bytes) -> DocumentChange:
    data = seal_document(serializer, signing.HOOK, encode_internal(stored), task_id)
    return DocumentChange(HOOK, task_id, before, data, due=stored.died_at)
