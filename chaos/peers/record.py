"""The recorded rounds, with their settings and counts: `results.json`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import msgspec

from chaos.peers.counting import Count
from chaos.peers.registry import PEERS, Peer, Profile
from omniq.testing.server_programs import postgres_install, redis_program

RESULTS = Path(__file__).parent / "results.json"

_VERSIONS = """
import importlib.metadata, json
known = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
print(json.dumps(known))
"""
_DRIVERS = ("asyncpg", "kombu", "psycopg", "redis")


class Row(msgspec.Struct, frozen=True):
    """One round, with everything that is needed to repeat it."""

    peer: str
    store: str
    profile: str
    settings: dict[str, object]
    returns_after: float | None
    versions: dict[str, str]
    day: str
    seed: int
    count: Count

    @property
    def key(self) -> tuple[str, str, str]:
        return self.peer, self.store, self.profile


class Results(msgspec.Struct, frozen=True):
    """The newest round of each queue, store and profile."""

    machine: str
    servers: str
    rows: list[Row]


def read() -> Results:
    """Return the recorded rounds; none before the first run."""
    if not RESULTS.exists():
        return Results(_machine(), _servers(), [])
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)


def write(new: Row) -> None:
    """Record a round, replacing the previous one, in the order of the registry."""
    rows = {row.key: row for row in read().rows} | {new.key: new}
    ordered = [rows[key] for key in keys() if key in rows]
    encoded = msgspec.json.encode(Results(_machine(), _servers(), ordered))
    RESULTS.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def keys() -> list[tuple[str, str, str]]:
    """Return the key of every possible round."""
    return [
        (peer.name, store, profile.name)
        for peer in PEERS
        for profile in peer.profiles
        for store in peer.stores
    ]


def make_row(peer: Peer, store: str, profile: Profile, seed: int, count: Count) -> Row:
    return Row(
        peer=peer.name,
        store=store,
        profile=profile.name,
        settings=profile.settings,
        returns_after=profile.returns_after,
        versions=_versions(peer),
        day=time.strftime("%Y-%m-%d", time.gmtime()),
        seed=seed,
        count=count,
    )


def _versions(peer: Peer) -> dict[str, str]:
    if not peer.requirements:
        return {"omniq": importlib.metadata.version("omniq")}
    command = [str(peer.python()), "-c", _VERSIONS]
    known = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    named = [requirement.partition("==")[0].partition("[")[0] for requirement in peer.requirements]
    return {name: known[name] for name in sorted({*named, *_DRIVERS}) if name in known}


def _machine() -> str:
    system = f"{platform.system()} on {platform.machine()}"
    return f"{os.cpu_count()} cores, {system}, Python {platform.python_version()}"


def _servers() -> str:
    postgres = _version_output(postgres_install(18) / "bin" / "postgres").split()[-1]
    redis = _version_output(redis_program()).split()[2].removeprefix("v=")
    return f"PostgreSQL {postgres}, Redis {redis}"


def _version_output(program: Path) -> str:
    done = subprocess.run([str(program), "--version"], check=True, capture_output=True, text=True)
    return done.stdout
