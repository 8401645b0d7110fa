"""Reads and checks a Redis server's settings: when a storage opens, and for `omniq doctor`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from omniq.errors import StorageError, StorageRefused
from omniq.storage.redis.encoding import pairs
from omniq.storage.redis.error_replies import ConnectionLost, ServerNotReady
from omniq.storage.types import Durability

OLDEST = (6, 2)

SendCommand = Callable[..., Awaitable[Any]]
"""Sends a command and returns its reply."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide what an acknowledged write survives, and whether omniq can run."""

    product: str
    version: str
    appendonly: bool
    appendfsync: str
    """Empty where the server does not say."""
    maxmemory_policy: str
    role: str
    mode: str
    replicas: int
    min_replicas: str
    is_loading: bool
    last_write_failed: str
    """What the server failed to write at its last attempt; empty when nothing."""

    @property
    def durability(self) -> Durability:
        """What an acknowledged write survives."""
        if not self.appendonly:
            return "none"
        return "power" if self.appendfsync == "always" else "os"


async def read_facts(send: SendCommand) -> ServerFacts:
    """Read the server's settings. Works without the right to read its configuration."""
    info = await _info(send)
    config = {
        **await _config(send, "maxmemory-policy"),
        **await _config(send, "append*"),
        **await _config(send, "min-replicas-to-write"),
    }
    failed = [
        what
        for what, field in (
            ("snapshot", "rdb_last_bgsave_status"),
            ("AOF write", "aof_last_write_status"),
            ("AOF rewrite", "aof_last_bgrewrite_status"),
        )
        if info.get(field, "ok") != "ok"
    ]
    return ServerFacts(
        product="Valkey" if "valkey_version" in info else "Redis",
        version=info.get("valkey_version") or info.get("redis_version", ""),
        appendonly=config.get("appendonly", "") == "yes" or info.get("aof_enabled") == "1",
        appendfsync=config.get("appendfsync", ""),
        maxmemory_policy=config.get("maxmemory-policy") or info.get("maxmemory_policy", ""),
        role=info.get("role", ""),
        mode=info.get("redis_mode") or info.get("server_mode", ""),
        replicas=int(info.get("connected_slaves", "0")),
        min_replicas=config.get("min-replicas-to-write", ""),
        is_loading=info.get("loading") == "1",
        last_write_failed=", ".join(failed),
    )


def check(facts: ServerFacts) -> None:
    """Refuse a server on which the promises do not hold."""
    if facts.mode == "sentinel":
        raise StorageRefused(
            "this server is a Sentinel: write redis+sentinel://host1,host2,host3/service in the URL"
        )
    if not _is_new_enough(facts):
        raise StorageRefused(
            f"{facts.product} {facts.version} is too old; omniq needs Redis 6.2 or newer, or Valkey"
        )
    if facts.maxmemory_policy not in ("noeviction", ""):
        raise StorageRefused(
            f"{facts.product} may evict tasks (maxmemory-policy {facts.maxmemory_policy}); "
            "set it with: CONFIG SET maxmemory-policy noeviction"
        )
    if facts.role in ("slave", "replica"):
        raise StorageRefused(f"this {facts.product} is a replica; name its primary in the URL")


_ADVICE = {
    "version": "bad: omniq needs Redis 6.2 or newer, or Valkey",
    "appendonly": "warn: a restart of the server loses every task; set appendonly yes",
    "appendfsync": "warn: a power cut may lose what was acknowledged in the last second or more; "
    "set appendfsync always",
    "maxmemory-policy": "bad: the server may evict tasks; set maxmemory-policy noeviction",
    "role": "bad: only the primary can be written to",
    "min-replicas-to-write": "warn: a primary that has lost its replicas goes on to accept tasks, which are "
    "lost when a replica is promoted; set min-replicas-to-write 1",
}


def report(facts: ServerFacts) -> list[tuple[str, str, str]]:
    """`(name, value, verdict)` of each setting; a verdict is "ok", "warn: …" or "bad: …"."""
    failed = facts.last_write_failed
    found = [
        ("version", f"{facts.product} {facts.version}", _is_new_enough(facts)),
        ("appendonly", "yes" if facts.appendonly else "no", facts.appendonly),
        ("appendfsync", facts.appendfsync, facts.appendfsync == "always"),
        ("maxmemory-policy", facts.maxmemory_policy, facts.maxmemory_policy == "noeviction"),
        ("role", facts.role, facts.role == "master"),
        ("cluster", "yes" if facts.mode == "cluster" else "no", True),
        ("replicas", str(facts.replicas), True),
        (
            "min-replicas-to-write",
            facts.min_replicas,
            not facts.replicas or facts.min_replicas not in ("", "0"),
        ),
        ("persistence", failed or "ok", not failed),
    ]
    advice = {**_ADVICE, "persistence": f"bad: the last {failed} failed; see the server's log"}
    return [
        (name, value or "unknown", "ok" if is_ok else advice[name]) for name, value, is_ok in found
    ]


async def _config(send: SendCommand, pattern: str) -> dict[str, str]:
    try:
        reply = await send("CONFIG", "GET", pattern)
    except StorageError:
        # Managed servers do not allow it; INFO has most of it.
        return {}
    return {name.decode(): value.decode() for name, value in pairs(reply)}


async def _info(send: SendCommand) -> dict[str, str]:
    try:
        return _parse_info(await send("INFO"))
    except (ConnectionLost, ServerNotReady):
        raise
    except StorageError:
        # Disabled, or not allowed: nothing but this check needs it.
        return {}


def _parse_info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _is_new_enough(facts: ServerFacts) -> bool:
    if not facts.version:
        return True
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts.version)[:2])
    return numbers >= OLDEST
