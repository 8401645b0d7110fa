"""A form that was refused, shown again with everything that was typed and the error beside its field."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_LABELS = {
    "args": "Positional arguments, a JSON list",
    "kwargs": "Keyword arguments, a JSON object",
    "eta": "Not before (UTC)",
    "start": "From (UTC)",
    "end": "To (UTC)",
    "new_queue": "Queue",
    "tz": "Time zone of the cron expression",
    "cron": "Cron expression",
    "confirm": "Name of the queue, to confirm",
    "note": "Note",
}
_LONG = ("args", "kwargs", "value")
_HIDDEN = ("id", "ids", "token", "back", "group")
_FIELD = re.compile(r"`\$\.(\w+)|^(?:[\w/-]+: )?(\w+): |field `(\w+)`")


class RefusedField(msgspec.Struct, frozen=True):
    """A field with the text that was typed. `error` is the message, at the field that it is about."""

    name: str
    text: str
    label: str
    kind: str
    error: str = ""


def refused_fields(fields: Sequence[tuple[str, str]], error: str) -> list[RefusedField]:
    """The fields of a form, and the error at the one that the message names.

    >>> [(each.name, bool(each.error)) for each in refused_fields([("args", "["), ("queue", "x")], "args: not JSON")]
    [('args', True), ('queue', False)]
    """
    found = _FIELD.search(error)
    wrong = "" if found is None else next((part for part in found.groups() if part), "")
    return [
        RefusedField(
            name,
            text,
            _LABELS.get(name, name.replace("_", " ").capitalize()),
            "hidden" if name in _HIDDEN else "long" if name in _LONG else "line",
            error if name == wrong else "",
        )
        for name, text in fields
        if name != "token"
    ]
