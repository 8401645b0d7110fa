"""Notes and mutes of operators, read from the audit log, which is the only place that stores them.

So each has a name and a time, and every storage has them. The newest 500 entries are read, for any number of pages at most
once in some seconds. A mute ends after at most 30 days.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from omniq.dashboard.app_state import AppState
from omniq.models import AuditEntry

MAX_MUTED_DAYS = 30

_MAX_ENTRIES = 500
_MAX_AGE = 5.0
_MAX_SHOWN = 10


class Mute(msgspec.Struct, frozen=True):
    """A muted group: until when, and who muted it why."""

    until: datetime
    by: str
    note: str


async def newest_entries(state: AppState) -> list[AuditEntry]:
    """The newest operator actions that succeeded, newest first."""

    async def read() -> list[AuditEntry]:
        entries, _ = await state.storage.audit_log("", _MAX_ENTRIES)
        return [each for each in entries if not each.outcome.startswith(("refused", "0 done"))]

    return await state.cached("entries", read, max_age=_MAX_AGE)


def about(entries: Sequence[AuditEntry], path: str, *subjects: str) -> list[AuditEntry]:
    """The newest entries with one of these subjects, and the notes about the page."""
    wanted = {path, *subjects}
    return [each for each in entries if each.subject in wanted][:_MAX_SHOWN]


def last_of(entries: Sequence[AuditEntry], action: str, subject: str) -> AuditEntry | None:
    """The newest entry of that action on that subject."""
    return next(
        (each for each in entries if (each.action, each.subject) == (action, subject)), None
    )


def muted_subject(group: str, days: int) -> str:
    """The subject of the entry that mutes a group."""
    return f"{group} {days}d"


def muted_groups(entries: Sequence[AuditEntry], now: datetime) -> dict[str, Mute]:
    """The groups that are muted now, by id."""
    decided: dict[str, Mute | None] = {}
    for entry in entries:
        group, _, days = entry.subject.partition(" ")
        if group in decided:
            continue
        if entry.action == "dead/unmute":
            decided[group] = None
        elif entry.action == "dead/mute" and days.removesuffix("d").isdigit():
            until = entry.at + timedelta(days=int(days.removesuffix("d")))
            decided[group] = Mute(until, entry.by, entry.note) if until > now else None
    return {group: mute for group, mute in decided.items() if mute is not None}
