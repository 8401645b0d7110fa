"""Hides what looks like a secret in the arguments of a task before anybody sees them.

By the name it stands under, at any depth; of an argument also by the name or the mark of its
parameter, if it was enqueued by its function. In a URL a password is known by its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omniq.models import Task
from omniq.settings import mask_url
from omniq.tasks.secret_parameters import tells_of_a_secret

REDACTED = "[redacted]"


def redacted(value: Any) -> Any:
    """The value, with `[redacted]` in the place of everything under a name that tells of secrets.

    >>> redacted({"user": "ada", "password": "x", "headers": [{"Authorization": "Bearer y"}]})
    {'user': 'ada', 'password': '[redacted]', 'headers': [{'Authorization': '[redacted]'}]}
    """
    match value:
        case Mapping():
            return {
                key: REDACTED if tells_of_a_secret(str(key)) else redacted(item)
                for key, item in value.items()
            }
        case list() | tuple():
            return [redacted(item) for item in value]
        case str() if "://" in value:
            return mask_url(value)
        case _:
            return value


def without_secrets(task: Task) -> Task:
    """The task as it may be shown."""
    args = [
        REDACTED if place in task.secrets else redacted(value)
        for place, value in enumerate(task.args)
    ]
    kwargs = {
        name: REDACTED if name in task.secrets else value
        for name, value in redacted(task.kwargs).items()
    }
    return msgspec.structs.replace(
        task, args=tuple(args), kwargs=kwargs, metadata=redacted(task.metadata)
    )


def restored(edited: Any, original: Any) -> Any:
    """The edited value, with the original in each place that still says `[redacted]`.

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
