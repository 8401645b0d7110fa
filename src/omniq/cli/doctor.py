"""`omniq doctor`: check the storage and the settings."""

from __future__ import annotations

import asyncio
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated
from urllib.parse import quote

import msgspec

from omniq._version import __version__
from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.options import Url
from omniq.cli.queue_session import CommandFailed
from omniq.models import Task
from omniq.operations.doctor import Finding, check_storage
from omniq.settings import Settings
from omniq.signing import protection
from omniq.storage import BaseStorage, open_storage
from omniq.storage.urls import local_path, storage_url
from omniq.text.escaping import visible
from omniq.text.masking import mask_url
from omniq.worker.process import console

_ROUND_TRIPS = 5
_QUEUE = "omniq-doctor"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `omniq doctor` reports, as `--json` prints it."""

    url: str
    healthy: bool
    findings: list[Finding]
    settings: list[dict[str, str]]


def doctor(
    url: Url = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Check the storage and the settings.

    Opens the storage, reads the settings of its server, writes a task that no worker will run, reads it
    back and deletes it. A storage on this machine that does not exist yet is not created: the checks use a
    temporary one beside it. Exits with 1 if a check fails.
    """
    settings = Settings.load(url=url)
    diagnosis = asyncio.run(_examine(settings))
    if as_json:
        sys.stdout.write(
            f"{msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode()}\n"
        )
    else:
        _show(diagnosis)
    return 0 if diagnosis.healthy else console.FAILURE


async def _examine(settings: Settings) -> Diagnosis:
    url = storage_url(settings)
    with _stand_in(url) as examined:
        async with open_storage(examined, settings=settings) as storage:
            return await _diagnose(url, storage)


async def _diagnose(url: str, storage: BaseStorage) -> Diagnosis:
    findings = [_versions(), *_place(url), *await check_storage(storage)]
    findings.append(_protection(storage))
    findings.append(await _round_trip(storage))
    shown, sources = storage.settings.shown(), storage.settings.sources
    return Diagnosis(
        url=mask_url(url),
        healthy=not any(finding.is_bad for finding in findings),
        findings=findings,
        settings=[
            {"name": name, "value": value, "source": sources[name]} for name, value in shown.items()
        ],
    )


def _versions() -> Finding:
    """The versions that a report of a problem should name."""
    names = ("msgspec", "loguru", "cronsim", "asyncpg", "hiredis", "nats-py", "obstore")
    found = [f"omniq {__version__}", f"Python {platform.python_version()}"]
    for name in names:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return Finding("versions", ", ".join([*found, platform.platform(terse=True)]))


@contextmanager
def _stand_in(url: str) -> Iterator[str]:
    """The URL of the storage to examine: for a missing one on this machine, a temporary one on the same disk."""
    path = local_path(url)
    if path is None or path.exists():
        yield url
        return
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    kind, query = url.partition(":")[0].lower(), url.partition("?")[2]
    try:
        made = tempfile.TemporaryDirectory(prefix=".omniq-doctor-", dir=folder)
    except OSError as error:
        raise CommandFailed(
            f"there is no storage at {mask_url(url)}, and none can be created in {folder} "
            f"({error.strerror}); name another storage with --url or OMNIQ_URL"
        ) from error
    with made as temporary:
        slashes = ":///" if kind == "sqlite" else "://"
        yield f"{kind}{slashes}{quote(temporary)}/{quote(path.name)}" + (
            f"?{query}" if query else ""
        )


def _place(url: str) -> list[Finding]:
    """Where a local storage is, or would be."""
    path = local_path(url)
    if path is None:
        return []
    missing = "" if path.exists() else ": does not exist yet; the first task or worker creates it"
    return [Finding("place", visible(f"{path.absolute()}{missing}"))]


def _protection(storage: BaseStorage) -> Finding:
    """Report whether records are signed or encrypted."""
    value = protection(storage.serializer)
    return Finding("records", "open: OMNIQ_SIGNING_KEY signs them" if value == "open" else value)


async def _round_trip(storage: BaseStorage) -> Finding:
    """Write a task, read it and delete it, a few times; report the median."""
    clock = storage.clock
    seconds: list[float] = []
    for _ in range(_ROUND_TRIPS):
        # Due long after it has expired, and without a stored result: if this command is
        # interrupted, no worker will ever run the task.
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
            return Finding("write and read", "lost", "bad: a task was accepted but cannot be read")
    return Finding("write and read", f"{statistics.median(seconds) * 1000:.2f} ms")


def _show(diagnosis: Diagnosis) -> None:
    output.print_line(diagnosis.url)
    width = max(len(finding.name) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        mark, _, remark = finding.verdict.partition(": ")
        line = f"  {mark:<4}  {finding.name:<{width}}  {finding.value}"
        output.print_line(f"{line} ({remark})" if remark else line)
    output.print_line("settings")
    for setting in diagnosis.settings:
        line = f"  {setting['name']:<20}  {setting['value']}  ({setting['source']})"
        output.print_line(line)
