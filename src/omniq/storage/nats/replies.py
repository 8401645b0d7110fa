"""The host's reply to a call: a value, or an error that is raised in the process of the caller."""

from __future__ import annotations

import msgspec

from omniq.errors import (
    InvalidValue,
    LeaseLost,
    OmniqError,
    QueueFull,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.serialization import internal_decoder
from omniq.storage.backend import Moved
from omniq.storage.nats.api_errors import StreamFull


class Reply(msgspec.Struct, array_like=True):
    """A value, or an error by its kind. `next_due`: when a task becomes visible."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    next_due: int | None = None
    error: str = ""
    text: str = ""
    number: int = 0


decode_reply = internal_decoder(Reply)

_KINDS: dict[str, type[OmniqError]] = {
    kind.__name__: kind
    for kind in (StreamFull, StorageRefused, StorageCorrupt, InvalidValue, StorageError)
}
"""Errors that consist of a text only."""


def error_reply(error: Exception) -> Reply:
    """The reply for a call that raised an error."""
    match error:
        case Moved():
            return Reply(error="moved")
        case QueueFull():
            return Reply(error="full", number=error.max_pending)
        case LeaseLost():
            return Reply(error="lost", text=error.owner)
        case OmniqError():
            kinds = [name for name, kind in _KINDS.items() if isinstance(error, kind)]
            return Reply(error=(kinds or ["StorageError"])[0], text=str(error))
        case _:
            return Reply(error="StorageError", text=f"the host of the store: {error!r}")


def raise_error(reply: Reply) -> None:
    """Raise the error of a reply, if it has one."""
    match reply.error:
        case "":
            return
        case "moved":
            raise Moved
        case "full":
            raise QueueFull(reply.number)
        case "lost":
            raise LeaseLost(reply.text)
        case kind:
            raise _KINDS.get(kind, StorageError)(reply.text)
