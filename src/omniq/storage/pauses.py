"""Pauses: the queues and functions of which nothing is claimed, why, and until when.

A pause is a document, in the step of which it begins for every worker. Claims read the names of all of them,
so a function has a name that no queue can have.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from omniq.clock import from_micros
from omniq.models import Runnable
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.backend import ANY, Document, DocumentChange
from omniq.text.to_json import JsonRecord

PAUSED_QUEUE = "paused_queue"
"""The kind of the documents that name paused queues and functions."""

_FUNCTION = "()"
"""The end of the key of a function."""


class Pause(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A queue or a function of which nothing is claimed.

    `reason` is what an operator has given; `until` is when the pause ends, None if somebody has to end it.
    """

    queue: str | None = None
    function: str | None = None
    reason: str = ""
    until: datetime | None = None

    @property
    def name(self) -> str:
        """The name of the queue, or the path of the function."""
        return self.queue or self.function or ""


class _Stored(msgspec.Struct, omit_defaults=True):
    reason: str = ""


_decode = lenient_decoder(_Stored, _Stored())


def key_of(*, queue: str | None = None, function: str | None = None) -> str:
    """The key of the document."""
    return f"{function}{_FUNCTION}" if queue is None else queue


def pausing(key: str, reason: str, until: int | None) -> DocumentChange:
    """The change that begins a pause."""
    data = encode_internal(_Stored(reason)) if reason else b""
    return DocumentChange(PAUSED_QUEUE, key, ANY, data, until)


def pause_in(document: Document) -> Pause:
    """The pause in a document."""
    function = function_in(document.key)
    return Pause(
        queue=document.key if function is None else None,
        function=function,
        reason=_decode(document.data).reason,
        until=_end_of(document),
    )


def _end_of(document: Document) -> datetime | None:
    try:
        return None if document.due is None else from_micros(document.due)
    except OverflowError:
        # No version of omniq has written this time. The pause stays until somebody ends it.
        return None


def function_in(key: str) -> str | None:
    """The path of a paused function; None for the key of a queue."""
    return key.removesuffix(_FUNCTION) if key.endswith(_FUNCTION) else None


def without_paused(runnable: Runnable | None, paused: frozenset[str]) -> Runnable | None:
    """The functions that a claim may take while these keys are paused."""
    functions = {path for key in paused if (path := function_in(key)) is not None}
    if not functions:
        return runnable
    runnable = runnable or Runnable(modules=None)
    return msgspec.structs.replace(runnable, excluded=runnable.excluded | functions)
