"""Refuses a server without conditional writes, and measures one for `omniq doctor`."""

from __future__ import annotations

import asyncio
import statistics

from omniq.clock import Clock
from omniq.errors import StorageRefused
from omniq.settings import Settings
from omniq.storage.s3.connection import S3Connection
from omniq.storage.s3.trimming import numbered

_AT_ONCE = 8
_SAMPLES = 5
_PUT_PRICE, _GET_PRICE = 5.0, 0.4
"""Dollars for a million requests, in S3 Standard in us-east-1."""

_MONTH = 30 * 86_400
_LOOKS_PER_POLL = 4
"""How often an idle worker reads the log in a polling interval: claims, leases, schedules, the queue's length."""


async def check(objects: S3Connection) -> None:
    """Connect. Raises `StorageRefused` if the server creates an object twice."""
    name = f"floor/{numbered(0)}"
    if await objects.create(name, b"") and await objects.create(name, b""):
        raise StorageRefused(
            "this server ignores If-None-Match, so two processes could claim one task; use S3, MinIO, "
            "SeaweedFS, Ceph, R2 or another server with conditional writes"
        )


async def report(
    objects: S3Connection, clock: Clock, settings: Settings
) -> list[tuple[str, str, str]]:
    """`(name, value, verdict)` of each check; a verdict is "ok", "warn: …" or "bad: …"."""
    name = f"doctor/{clock.new_id()}"
    created = await asyncio.gather(*(objects.create(name, b"") for _ in range(_AT_ONCE)))
    winners = sum(created)
    puts, gets = [], []
    for _ in range(_SAMPLES):
        began = clock.monotonic()
        await objects.put(name, b"")
        puts.append(clock.monotonic() - began)
        began = clock.monotonic()
        await objects.get(name)
        gets.append(clock.monotonic() - began)
    await objects.delete([name])
    verdict = "ok" if winners == 1 else "bad: two processes could claim one task"
    return [
        ("conditional writes", f"{winners} of {_AT_ONCE} concurrent creates won", verdict),
        (
            "latency",
            f"PUT {statistics.median(puts) * 1000:.1f} ms, GET {statistics.median(gets) * 1000:.1f} ms",
            "ok",
        ),
        *[await _count(objects, *each) for each in (("commits", "log"), ("snapshots", "snap"))],
        ("price", _price(statistics.median(puts), settings), "ok"),
    ]


async def _count(objects: S3Connection, name: str, folder: str) -> tuple[str, str, str]:
    found = await objects.list(folder)
    return name, f"{len(found)} objects, {sum(each.size for each in found):,} bytes", "ok"


def _price(put: float, settings: Settings) -> str:
    # An idle worker renews its lease, and its loops poll the log; a busy worker always has one append in progress.
    renewals = _MONTH / (settings.lease / 3)
    looks = _MONTH / settings.poll_interval * _LOOKS_PER_POLL
    idle = (renewals * _PUT_PRICE + looks * _GET_PRICE) / 1e6
    busy = 3_600 / put * (_PUT_PRICE + _GET_PRICE) / 1e6
    return (
        f"about ${idle:.2f} a month for an idle worker, at most ${busy:.2f} an hour for a busy one "
        "(S3 Standard)"
    )
