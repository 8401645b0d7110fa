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

from omniq.models import Task
from omniq.text.to_json import REDACTED, redacted

__all__ = ["REDACTED", "redacted", "restored", "without_secrets"]


def without_secrets(task: Task) -> Task:
    """The task with its secrets replaced by `[redacted]`, to be shown."""
    args, kwargs, metadata = task.shown_arguments()
    return msgspec.structs.replace(task, args=args, kwargs=kwargs, metadata=metadata)


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
