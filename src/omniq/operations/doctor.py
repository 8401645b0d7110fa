"""What a storage guarantees and how its server is configured, as far as a client can check."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from omniq.storage.base import BaseStorage

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
    findings = _guarantees(storage)
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
