"""Hides secrets in the arguments of a task before they are shown.

A value is a secret if its key looks like the name of one, at any depth. An argument is also one if
its parameter has such a name or is marked `Secret`; that is known only when the task was enqueued
by its function, not by a dotted path. In text, the passwords of URLs and the values of secret names
in `name=value` are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omniq.masking import is_secret_name, mask_text
from omniq.models import Task

REDACTED = "[redacted]"


def redacted(value: Any) -> Any:
    """The value, with `[redacted]` for every item whose key looks like the name of a secret.

    >>> redacted({"user": "ada", "password": "x", "headers": [{"Authorization": "Bearer y"}]})
    {'user': 'ada', 'password': '[redacted]', 'headers': [{'Authorization': '[redacted]'}]}
    """
    match value:
        case Mapping():
            return {
                key: REDACTED if is_secret_name(str(key)) else redacted(item)
                for key, item in value.items()
            }
        case list() | tuple():
            return [redacted(item) for item in value]
        case set() | frozenset():
            return type(value)(map(redacted, value))
        case str():
            return mask_text(value)
        case bytes() | bytearray():
            text = value.decode("utf-8", "surrogateescape")
            masked = mask_text(text)
            return value if masked == text else masked.encode("utf-8", "surrogateescape")
        case _:
            return value


def without_secrets(task: Task) -> Task:
    """The task with its secrets replaced by `[redacted]`, to be shown."""
    args = [
        REDACTED if position in task.secrets else redacted(value)
        for position, value in enumerate(task.args)
    ]
    kwargs = {
        name: REDACTED if name in task.secrets else value
        for name, value in redacted(task.kwargs).items()
    }
    return msgspec.structs.replace(
        task, args=tuple(args), kwargs=kwargs, metadata=redacted(task.metadata)
    )


def restored(edited: Any, original: Any) -> Any:
    """The edited value, with the original wherever it still is `[redacted]`.

    >>> restored({"user": "eve", "password": REDACTED}, {"user": "ada", "password": "x"})
    {'user': 'eve', 'password': 'x'}
    """
    if edited == REDACTED or (isinstance(original, str) and edited == redacted(original)):
        return original
    if isinstance(edited, dict) and isinstance(original, Mapping):
        return {key: restored(item, original.get(key, item)) for key, item in edited.items()}
    if isinstance(edited, list) and _is_list(original) and len(edited) == len(original):
        return [restored(*pair) for pair in zip(edited, original, strict=True)]
    return edited


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
