"""Requests to one worker: to stop, to change its number of slots, or to answer. The worker reads them at its heartbeat.

A request is a document under the id of the worker and a fresh id; the answer is another one under the same
key. Both are read once. Anyone who can write to the store can make requests, as they can pause a worker.
"""

from __future__ import annotations

import msgspec

from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.backend import ANY, Document, DocumentChange
from omniq.storage.types import Action, WorkerAnswer, WorkerRequest

REQUEST, ANSWER = "worker_request", "worker_answer"
"""The kinds of the documents."""


class _Stored(msgspec.Struct, array_like=True):
    action: Action
    slots: int = 0


_decode_request = lenient_decoder(_Stored, None)
decode_answer = lenient_decoder(WorkerAnswer, None)


def request_key(owner: str, request_id: str) -> str:
    """The key of a request to that worker."""
    return f"{owner}/{request_id}"


def request_change(key: str, action: Action, now: int, slots: int = 0) -> DocumentChange:
    """The document of a request."""
    return DocumentChange(REQUEST, key, ANY, encode_internal(_Stored(action, slots)), due=now)


def answer_change(key: str, answer: WorkerAnswer, now: int) -> DocumentChange:
    """The document of an answer."""
    return DocumentChange(ANSWER, key, ANY, encode_internal(answer), due=now)


def read_request(document: Document) -> WorkerRequest | None:
    """The request; None for one that this version does not know."""
    stored = _decode_request(document.data)
    if stored is None:
        return None
    return WorkerRequest(document.key, stored.action, stored.slots, document.due or 0)
