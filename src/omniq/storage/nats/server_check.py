"""Checks a server and the streams of a store: when a storage opens, and for `omniq doctor`."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import msgspec

from omniq.errors import StorageRefused
from omniq.storage.nats.address import Address
from omniq.storage.nats.api_errors import NoResponders
from omniq.storage.nats.connection import ServerConnection
from omniq.storage.types import Durability

OLDEST = (2, 10)
_MONITOR_SECONDS = 3.0


class Config(msgspec.Struct):
    """The settings of a stream that a store depends on."""

    name: str
    subjects: list[str] = []
    retention: str = ""
    discard: str = ""
    storage: str = ""
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    max_bytes: int = -1
    max_age: int = 0
    num_replicas: int = 1
    sealed: bool = False
    deny_purge: bool = False
    metadata: dict[str, str] = {}


class State(msgspec.Struct):
    """What a stream holds."""

    messages: int
    first_seq: int
    last_seq: int
    bytes: int = 0
    subjects: dict[str, int] = {}


class StreamInfo(msgspec.Struct):
    """A stream, and the server's time."""

    config: Config
    state: State
    created: str
    ts: str = ""

    @property
    def id(self) -> str:
        """Changes if the stream is deleted and created again."""
        return self.config.metadata.get("omniq") or self.created


class _Store(msgspec.Struct):
    sync_interval: int = 0
    sync_always: bool = False


class _Monitored(msgspec.Struct):
    config: _Store


async def check_server(connection: ServerConnection) -> None:
    """Refuse a server that cannot keep the guarantees."""
    if connection.version < OLDEST:
        major, minor = connection.version
        raise StorageRefused(f"NATS {major}.{minor} is too old; omniq needs 2.10 or later")
    try:
        await connection.api("INFO", dict[str, Any])
    except NoResponders as error:
        raise StorageRefused(f"{error}; enable JetStream: start the server with -js") from error


def check_stream(config: Config, subjects: list[str]) -> None:
    """Refuse a stream that would lose messages, or that another program uses."""
    wanted = {
        "retention": "limits",
        "discard": "new",
        "storage": "file",
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_age": 0,
        "sealed": False,
        "deny_purge": False,
        "subjects": subjects,
    }
    for name, value in wanted.items():
        found = getattr(config, name)
        if found != value:
            raise StorageRefused(
                f"the stream {config.name} has {name} {found!r}, and a store needs {value!r}: change "
                "the stream, or name another store in the URL"
            )


async def read_durability(address: Address) -> Durability:
    """What an acknowledged write survives, as far as the server's monitoring shows it."""
    store = await _read_monitor(address)
    return "power" if store is not None and store.sync_always else "os"


async def _read_monitor(address: Address) -> _Store | None:
    if not address.monitor:
        return None
    try:
        data = await asyncio.to_thread(_fetch, f"{address.monitor}/jsz?config=1")
        return msgspec.json.decode(data, type=_Monitored).config
    except (OSError, ValueError):
        # Without monitoring the setting is unknown, but the store works.
        return None


def _fetch(url: str) -> bytes:
    # The scheme was checked when the URL of the storage was read.
    with urllib.request.urlopen(url, timeout=_MONITOR_SECONDS) as reply:
        return bytes(reply.read(1 << 20))


async def report(
    connection: ServerConnection, address: Address, streams: list[StreamInfo]
) -> list[tuple[str, str, str]]:
    """`(name, value, verdict)` of each setting; a verdict is "ok", "warn: …" or "bad: …"."""
    store = await _read_monitor(address)
    major, minor = connection.version
    sync, verdict = (
        "unknown",
        "warn: add ?monitor=http://host:8222 to the URL, so that omniq can read it",
    )
    if store is not None:
        sync = "always" if store.sync_always else f"{store.sync_interval / 1e9:g} s"
        verdict = (
            "ok"
            if store.sync_always
            else "warn: a power cut may lose writes acknowledged since the last sync; set sync_interval: always"
        )
    log = streams[0].config
    return [
        ("version", f"NATS {major}.{minor}", "ok"),
        ("sync_interval", sync, verdict),
        (
            "replicas",
            str(log.num_replicas),
            "ok"
            if log.num_replicas >= address.replicas
            else f"warn: the URL asks for {address.replicas}; change the streams with: nats stream edit",
        ),
        *(
            (info.config.name, f"{info.state.messages} messages, {info.state.bytes} bytes", "ok")
            for info in streams
        ),
    ]
