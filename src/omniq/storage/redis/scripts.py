"""The scripts of `storage/lua`, one for each verb, and the patience to have them run.

A script's text is put together once: the parts it `uses`, each of which names the `keys` it
touches, so that every key is declared. Every script may be run again after a reply was lost; it
then knows (`is_repeat`), and does what it has done already no second time.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import StorageError
from omniq.storage.redis.connection import Link, Lost, UnknownScript, Unready, pack

PATIENCE = 15.0
"""Seconds for which a call goes on trying to reach the server."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_PASSING = (Lost, Unready, UnknownScript)

_encode = msgspec.msgpack.Encoder().encode
_SHORT = [bytes((0xA0 | size,) if size < 32 else (0xD9, size)) for size in range(256)]
"""What comes before text of that size."""


class Script(msgspec.Struct, frozen=True):
    """A script's text, and the names of the keys it touches, in the order of its KEYS."""

    text: str
    keys: tuple[str, ...]
    sha: str


@cache
def script(name: str) -> Script:
    """The script of that name."""
    return compose(_source(name))


def compose(main: str) -> Script:
    """A script with all the parts it uses, and the keys of all of them declared."""
    parts = [*(_source(part) for part in _header(main, "uses")), main]
    keys = tuple(dict.fromkeys(key for part in parts for key in _header(part, "keys")))
    declared = [f"local {name} = KEYS[{number}]" for number, name in enumerate(keys, start=1)]
    text = "\n".join([*declared, *parts])
    return Script(text, keys, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _source(name: str) -> str:
    return resources.files("omniq.storage.redis").joinpath(f"lua/{name}.lua").read_text("utf-8")


def _header(source: str, name: str) -> list[str]:
    found = re.search(rf"^-- {name}:(.*)$", source, re.MULTILINE)
    return found[1].split() if found else []


def raw(data: bytes) -> msgspec.Raw:
    """Bytes as the scripts can read them: the server's decoder knows no binary type."""
    size = len(data)
    if size < 256:
        return msgspec.Raw(_SHORT[size] + data)
    if size < 65_536:
        return msgspec.Raw(b"\xda" + size.to_bytes(2, "big") + data)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4, "big") + data)


class Scripts:
    """Runs scripts on the keys of one store. `now` says the time; 0 leaves it to the server."""

    def __init__(self, link: Link, prefix: str, now: Callable[[], int]) -> None:
        self._link = link
        self._prefix = prefix
        self._now = now
        self._starts: dict[str, bytes] = {}

    def key(self, name: str) -> str:
        """The full name of a key. All of them have one hash tag, and so one slot of a cluster."""
        return f"{{{self._prefix}}}:{name}"

    async def run(self, name: str, *arguments: Any) -> Any:
        """The script's reply. Whatever happens to the connection, it takes effect at most once."""
        is_repeat = False

        async def attempt() -> Any:
            nonlocal is_repeat
            try:
                try:
                    return await self._link.send(self._packed(name, is_repeat, arguments))
                except UnknownScript:
                    await self._link.command("SCRIPT", "LOAD", script(name).text)
                    return await self._link.send(self._packed(name, is_repeat, arguments))
            except Lost as lost:
                is_repeat = is_repeat or lost.was_sent
                raise

        return await patiently(attempt)

    async def command(self, *parts: bytes | str | int) -> Any:
        """The reply to a command that may be sent twice."""
        return await patiently(lambda: self._link.command(*parts))

    def _packed(self, name: str, is_repeat: bool, arguments: tuple[Any, ...]) -> bytes:
        start = self._starts.get(name)
        if start is None:
            start = self._starts[name] = self._start(name)
        request = _encode((self._now(), int(is_repeat), *arguments))
        return b"%b$%d\r\n%b\r\n" % (start, len(request), request)

    def _start(self, name: str) -> bytes:
        """The beginning of the command, which is the same every time."""
        known = script(name)
        keys = map(self.key, known.keys)
        return pack("EVALSHA", known.sha, len(known.keys), *keys, more=1)


async def patiently(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Try until it works, with longer and longer pauses; the last error after `PATIENCE`."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    pause = 0.0
    try:
        return await attempt()
    except _PASSING as error:
        last: StorageError = error
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                # The first time at once: most often only this connection was lost.
                await SYSTEM_CLOCK.sleep(pause * (0.5 + SYSTEM_CLOCK.random() / 2))
                pause = min(max(_FIRST_PAUSE, pause * 2), _LONGEST_PAUSE)
                try:
                    return await attempt()
                except _PASSING as error:
                    last = error
    except TimeoutError as error:
        raise last from error
