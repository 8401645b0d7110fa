"""`omniq doctor`: what this storage promises, checked."""

from __future__ import annotations

import asyncio
import statistics
from datetime import timedelta
from typing import Annotated, Protocol, runtime_checkable

import msgspec
import typer

from omniq.cli.options import Url
from omniq.models import Task
from omniq.service import console
from omniq.settings import Settings, mask_url
from omniq.storage import BaseStorage, open_storage
from omniq.storage._urls import storage_url

_ROUND_TRIPS = 5
_QUEUE = "omniq-doctor"

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


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, as `--json` prints it."""

    url: str
    healthy: bool
    findings: list[Finding]
    settings: list[dict[str, str]]


@runtime_checkable
class Reporting(Protocol):
    """A storage on a server, which tells how that server is set up."""

    async def server_report(self) -> list[tuple[str, str, str]]:
        """Names, values and verdicts."""


def doctor(
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> int:
    """Say what this storage promises, as far as that can be checked from here.

    Opens it, asks a server for its settings, writes a task that nobody will run, reads it back
    and removes it. Exits with 1 if something is bad.
    """
    settings = Settings.load(url=url)
    diagnosis = asyncio.run(_examine(settings))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode())
    else:
        _show(diagnosis)
    return 0 if diagnosis.healthy else console.FAILURE


async def _examine(settings: Settings) -> Diagnosis:
    async with open_storage(settings=settings) as storage:
        findings = _promises(storage)
        if isinstance(storage, Reporting):
            findings += [Finding(*line) for line in await storage.server_report()]
        findings.append(await _round_trip(storage))
        shown, sources = storage.settings.shown(), storage.settings.sources
    return Diagnosis(
        url=mask_url(storage_url(settings)),
        healthy=not any(finding.is_bad for finding in findings),
        findings=findings,
        settings=[
            {"name": name, "value": value, "source": sources[name]} for name, value in shown.items()
        ],
    )


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


async def _round_trip(storage: BaseStorage) -> Finding:
    """Write a task, read it and remove it, a few times; the median is told."""
    clock = storage.clock
    seconds: list[float] = []
    for _ in range(_ROUND_TRIPS):
        # Due long after it has expired, and nothing of it is kept: should this be interrupted, no
        # worker will ever run it.
        task = Task(
            func_path="omniq.doctor",
            queue=_QUEUE,
            eta=clock.now() + timedelta(days=2),
            expires=clock.now() + timedelta(days=1),
            result_ttl=0,
        )
        began = clock.monotonic()
        await storage.enqueue(task)
        found = await storage.get_task(task.id)
        seconds.append(clock.monotonic() - began)
        await storage.cancel(task.id)
        if found is None or found.func_path != task.func_path:
            return Finding("write and read", "lost", "bad: a task was accepted and is not there")
    return Finding("write and read", f"{statistics.median(seconds) * 1000:.2f} ms")


def _show(diagnosis: Diagnosis) -> None:
    typer.echo(console.visible(diagnosis.url))
    width = max(len(finding.name) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        mark, _, remark = finding.verdict.partition(": ")
        line = f"  {mark:<4}  {finding.name:<{width}}  {finding.value}"
        typer.echo(console.visible(f"{line} ({remark})" if remark else line))
    typer.echo("settings")
    for setting in diagnosis.settings:
        line = f"  {setting['name']:<20}  {setting['value']}  ({setting['source']})"
        typer.echo(console.visible(line))
