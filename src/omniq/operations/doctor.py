"""What a storage guarantees and how its server is configured, as far as a client can check."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, runtime_checkable

import msgspec

from omniq.clock import SYSTEM_CLOCK, from_micros
from omniq.operations.formatting import count_of
from omniq.operations.health import clock_differences
from omniq.storage.base import BaseStorage
from omniq.storage.store_clock import StoreClock

_LARGEST_CLOCK_DIFFERENCE = 1_000_000
"""Microseconds; a larger difference is worth a warning."""

_REACH = {
    "process": "one process",
    "machine": "any number of processes on one machine",
    "fleet": "any number of machines",
}
_DURABILITY = {
    "none": "nothing: acknowledged tasks may be lost when the process or server stops",
    "os": "the end of the process, not a power cut",
    "power": "a power cut",
}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. The verdict is "ok", "warn: …" or "bad: …"."""

    name: str
    value: str
    verdict: str = "ok"

    @property
    def is_bad(self) -> bool:
        return self.verdict.startswith("bad")


@runtime_checkable
class HasServerReport(Protocol):
    """A storage on a server that can report how the server is configured."""

    async def server_report(self) -> list[tuple[str, str, str]]:
        """(name, value, verdict) of each check of the server."""


async def check_storage(storage: BaseStorage) -> list[Finding]:
    """The guarantees of the storage, then the checks of its server, if it has one."""
    findings = [*_guarantees(storage), await _incarnation(storage), await _clock(storage)]
    findings += await _older_documents(storage)
    if isinstance(storage, HasServerReport):
        findings += [Finding(*line) for line in await storage.server_report()]
    return findings


def _guarantees(storage: BaseStorage) -> list[Finding]:
    capabilities = storage.capabilities
    return [
        Finding("backend", capabilities.name),
        Finding("shared by", _REACH[capabilities.reach]),
        Finding("survives", _DURABILITY[capabilities.durability], _durability_verdict(storage)),
        Finding(
            "batches", "all or nothing" if capabilities.atomic_batches else "in part after a crash"
        ),
        Finding(
            "max_pending", "exact" if capabilities.exact_bound else "may be exceeded by a race"
        ),
        Finding("SQL transactions", "yes" if capabilities.transactions else "no"),
    ]


async def _incarnation(storage: BaseStorage) -> Finding:
    record = await storage.store_record()
    if not record.raised_at:
        return Finding("epoch", str(record.epoch))
    since = from_micros(record.raised_at)
    is_new = storage.clock.now() - since < timedelta(days=1)
    verdict = "warn: the store went back to an earlier state, or was restored" if is_new else "ok"
    return Finding("epoch", f"{record.epoch}, since {since:%F %T} UTC", verdict)


async def _older_documents(storage: BaseStorage) -> list[Finding]:
    """What an older omniq has stored without a seal, if there is any; of checkpoints among the first."""
    older = await storage.older_documents(max_pages=1)
    if not older:
        return []
    schedules = sum(each.kind == "schedule" for each in older)
    count = f"{count_of(schedules, 'schedule')}, {count_of(len(older) - schedules, 'checkpoint')}"
    verdict = "warn: they wait, because they are not signed as a whole; run omniq schema upgrade"
    return [Finding("of an older omniq", count, verdict)]


async def _clock(storage: BaseStorage) -> Finding:
    if isinstance(storage.clock, StoreClock):
        difference = abs(storage.clock.micros() - SYSTEM_CLOCK.micros())
        verdict = "warn: an eta that is computed here is off; the server's clock decides"
        return Finding(
            "clock",
            f"the server's, differs by {difference / 1000:.0f} ms from this machine's",
            "ok" if difference < _LARGEST_CLOCK_DIFFERENCE else verdict,
        )
    differing = clock_differences(storage, await storage.workers())
    verdict = f"warn: another time on workers {', '.join(differing)}" if differing else "ok"
    return Finding("clock", "this machine's", verdict)


def _durability_verdict(storage: BaseStorage) -> str:
    capabilities, wanted = storage.capabilities, storage.settings.durability
    levels = list(_DURABILITY)
    # Only for a server: its durability is configured there, and our settings do not change it.
    # Memory is never durable, and a user who chose it knows that.
    if capabilities.reach == "fleet" and levels.index(capabilities.durability) < levels.index(
        wanted
    ):
        return f"warn: durability is {wanted!r} in the settings; the server is configured for less"
    return "ok"
