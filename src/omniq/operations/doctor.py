"""What a storage promises, as far as that can be told from here, in words."""

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
    "none": "nothing: what is acknowledged may be lost with the process or server that keeps it",
    "os": "the end of the process, not a power cut",
    "power": "a power cut",
}


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. The verdict is "ok", "warn: …" or "bad: …"."""

    name: str
    value: str
    verdict: str = "ok"

    @property
    def is_bad(self) -> bool:
        return self.verdict.startswith("bad")


@runtime_checkable
class Reporting(Protocol):
    """A storage on a server, which tells how that server is set up."""

    async def server_report(self) -> list[tuple[str, str, str]]:
        """Names, values and verdicts."""


async def promises_of(storage: BaseStorage) -> list[Finding]:
    """What the storage says of itself, and what its server says of its own settings."""
    findings = _promises(storage)
    if isinstance(storage, Reporting):
        findings += [Finding(*line) for line in await storage.server_report()]
    return findings


def _promises(storage: BaseStorage) -> list[Finding]:
    promised = storage.capabilities
    return [
        Finding("backend", promised.name),
        Finding("shared by", _REACH[promised.reach]),
        Finding("survives", _DURABILITY[promised.durability], _on_durability(storage)),
        Finding(
            "batches", "all or nothing" if promised.atomic_batches else "in part after a crash"
        ),
        Finding("max_pending", "exact" if promised.exact_bound else "may be exceeded by a race"),
        Finding("SQL transactions", "yes" if promised.transactions else "no"),
    ]


def _on_durability(storage: BaseStorage) -> str:
    promised, wanted = storage.capabilities, storage.settings.durability
    levels = list(_DURABILITY)
    # A server has its own settings, which ours do not change; memory was asked for by its name.
    if promised.reach == "fleet" and levels.index(promised.durability) < levels.index(wanted):
        return f"warn: durability is {wanted!r} in the settings, and the server's do not give that"
    return "ok"
