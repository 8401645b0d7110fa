"""Alerts: posts problems to a webhook when they begin and when they end.

A problem is what the overview shows as critical or as a warning, or new dead letters. The body is JSON whose
`text` is what chat programs show.
"""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from urllib.parse import urlsplit

import msgspec

from omniq.dashboard.problems import Problem, problems
from omniq.dashboard.sampler import Sampler, Snapshot
from omniq.errors import InvalidValue, OmniqError, SettingsError
from omniq.events import WorkerProblem
from omniq.log import write
from omniq.operations.formatting import count_of

WEBHOOK_VARIABLE = "OMNIQ_DASHBOARD_WEBHOOK"

_CHECK_SECONDS = 30.0
_CHECKS_BEFORE = 2
"""A problem is posted when this number of checks have found it: one that ends soon needs no alert."""

_DEAD_SECONDS = 900.0
"""New dead letters are posted at most once in this time."""

_POST_SECONDS = 10.0


class Alerts:
    """Checks for problems as long as it runs, and posts changes to the webhook."""

    def __init__(
        self, sampler: Sampler, url: str, *, check_seconds: float = _CHECK_SECONDS
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"{WEBHOOK_VARIABLE}: expected a URL with http or https")
        self._sampler = sampler
        self._url = url
        self._check_seconds = check_seconds
        self._seen: dict[str, int] = {}
        self._posted: dict[str, str] = {}
        self._dead: int | None = None
        self._dead_at = float("-inf")
        self.host = parts.hostname
        """The host of the webhook. The rest of its URL is often a secret."""

    async def run(self) -> None:
        """Check until cancelled. A message that cannot be posted is tried again at the next check."""
        while True:
            try:
                await self.check()
            except (OmniqError, OSError, HTTPException) as error:
                # The dashboard itself shows that the storage does not respond.
                write(WorkerProblem.of(f"webhook at {self.host}", error))
            await self._sampler.clock.sleep(self._check_seconds)

    async def check(self) -> None:
        """Post what has begun or ended since the last check."""
        snapshot = await self._sampler.current()
        now = self._sampler.clock.now()
        found = {
            _key(each): each.text for each in problems(snapshot, now) if each.severity != "note"
        }
        self._seen = {key: self._seen.get(key, 0) + 1 for key in found}
        lasting = {
            key: found[key] for key, checks in self._seen.items() if checks >= _CHECKS_BEFORE
        }
        began = [text for key, text in lasting.items() if key not in self._posted]
        ended = [text for key, text in self._posted.items() if key not in found]
        dead = self._new_dead(snapshot)
        if began or ended or dead:
            name = snapshot.overview.storage
            await self._post(_message(name, began + ([dead] if dead else []), ended))
        self._posted = {
            key: self._posted.get(key, text)
            for key, text in found.items()
            if key in lasting or key in self._posted
        }
        if dead:
            self._dead_at = self._sampler.clock.monotonic()
        if dead or self._dead is None:
            self._dead = snapshot.overview.dead if snapshot.overview.counted_at else None

    async def test(self) -> None:
        """Post a message that says that it is a test. Raises `InvalidValue` if that fails."""
        try:
            await self._post(_message("omniq", ["This is a test of the dashboard's alerts."], []))
        except (OSError, HTTPException) as error:
            raise InvalidValue(f"webhook at {self.host}: {error}") from None

    def _new_dead(self, snapshot: Snapshot) -> str:
        """How many tasks have failed permanently since that was last posted; empty if none has."""
        overview, now = snapshot.overview, self._sampler.clock.monotonic()
        if overview.counted_at is None or self._dead is None:
            return ""
        if overview.dead < self._dead:
            # Some were retried or deleted.
            self._dead = overview.dead
        new = overview.dead - self._dead
        if not new or now - self._dead_at < _DEAD_SECONDS:
            return ""
        return f"{count_of(new, 'new dead letter')}, {overview.dead:,} in all"

    async def _post(self, message: dict[str, object]) -> None:
        await asyncio.to_thread(_post, self._url, msgspec.json.encode(message))


def webhook_of(environment: Mapping[str, str] = os.environ) -> str:
    """The URL that the environment names; empty if it names none."""
    return environment.get(WEBHOOK_VARIABLE, "")


def _key(problem: Problem) -> str:
    """What stays the same while a problem lasts: its text has numbers that change."""
    return " ".join([problem.path, *problem.fields.values()])


def _message(store: str, began: list[str], ended: list[str]) -> dict[str, object]:
    lines = [*began, *(f"ended: {text}" for text in ended)]
    text = "\n".join(f"omniq ({store}): {line}" for line in lines)
    return {"text": text, "began": began, "ended": ended}


def _post(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=_POST_SECONDS):
        pass
