"""A reason why a task is in its state, as `omniq explain` shows it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason. `code` is for programs, `text` for people; `hint` is what to do about it.

    `since` and `until` are when it began and when it ends, as far as that is known.
    """

    code: str
    text: str
    since: datetime | None = None
    until: datetime | None = None
    hint: str = ""
    facts: dict[str, Any] = {}
