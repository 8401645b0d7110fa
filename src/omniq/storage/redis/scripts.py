"""The scripts in `lua/`, one for each verb, and the retries when the connection is lost.

The header of a script names the parts in `lua/lib/` that it `uses`. The text of a script is composed
once, with all its parts; a key is written as `KEYS.name`, and is declared with that. Every script may be run again after its reply was lost: it then knows that it is a
repeat (`is_repeat`), and does not do a second time what it has done.
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

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.concurrency.backoff import backoff
from omniq.errors import StorageError
from omniq.storage.redis.connection import ServerConnection, pack
from omniq.storage.redis.encoding import LUA_CONSTANTS
from omniq.storage.redis.error_replies import ConnectionLost, ServerNotReady, UnknownScript
from omniq.storage.store_clock import given_time

RETRY_SECONDS = 15.0
"""How long a call tries to reach its server, without the setting `reconnect_timeout`."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_TRANSIENT = (ConnectionLost, ServerNotReady, UnknownScript)

FORMAT = 2
"""The number of the store's layout; the names of its keys have it."""

_ERAS = {"old_": "", "moved_": "1:"}

_encode = msgspec.msgpack.Encoder().encode


class Script(msgspec.Struct, frozen=True):
    """A script's text, and the names of the keys it touches, in the order of its KEYS."""

    text: str
    keys: tuple[str, ...]
    sha: str


@cache
def script(name: str, largest: int = 1 << 21) -> Script:
    """The script of that name. `largest`: bytes of a value that it returns, at most."""
    return compose(_source(name), largest)


def compose(main: str, largest: int = 1 << 21) -> Script:
    """A script with all the parts it uses. Its keys and the parts of a place become plain numbers.

    A number costs nothing, whereas every local that functions share slows down each of their definitions,
    which are made anew in each call.
    """
    text = "\n".join([*(_source(f"lib/{part}") for part in uses(main)), main])
    names = tuple(dict.fromkeys(re.findall(r"\bKEYS\.(\w+)", text)))
    text = re.sub(r"\bKEYS\.(\w+)", lambda found: f"KEYS[{names.index(found[1]) + 1}]", text)
    constants = {**LUA_CONSTANTS, "LARGEST_VALUE": largest}
    text = re.sub(r"\b[A-Z_]{3,}\b", lambda found: str(constants.get(found[0], found[0])), text)
    return Script(text, names, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _source(name: str) -> str:
    return resources.files("omniq.storage.redis").joinpath(f"lua/{name}.lua").read_text("utf-8")


def uses(source: str) -> list[str]:
    """The parts that a script names in its header."""
    found = re.search(r"^-- uses:(.*)$", source, re.MULTILINE)
    return found[1].split() if found else []


class Scripts:
    """Runs scripts on the keys of one store. They use the server's time, unless a test gave a clock."""

    def __init__(
        self,
        connection: ServerConnection,
        prefix: str,
        clock: Clock,
        largest: int,
        reconnect_timeout: float | None = None,
    ) -> None:
        self._connection = connection
        self._largest = largest
        self._reconnect_timeout = reconnect_timeout
        self._prefix = prefix
        self._clock = clock
        self._command_starts: dict[str, bytes] = {}

    def key(self, name: str) -> str:
        """The full name of a key. All of them have one hash tag, and so one slot of a cluster.

        Names that begin with `old_` are keys of version 1, and `moved_` those that `upgrade` moves.
        """
        for era, place in _ERAS.items():
            if name.startswith(era):
                return f"{{{self._prefix}}}:{place}{name.removeprefix(era)}"
        return f"{{{self._prefix}}}:{FORMAT}:{name}"

    async def run(self, name: str, *arguments: Any) -> Any:
        """The script's reply. It takes effect at most once, also when the connection is lost."""
        try:
            return await self._connection.send(self._packed(name, False, arguments))
        except _TRANSIENT as error:
            first = error
        is_repeat = _was_sent(first)

        async def attempt() -> Any:
            nonlocal is_repeat
            try:
                packed = self._packed(name, is_repeat, arguments)
                load = pack("SCRIPT", "LOAD", script(name, self._largest).text)
                return await self._connection.send(packed, after=load)
            except _TRANSIENT as error:
                is_repeat = is_repeat or _was_sent(error)
                raise

        if isinstance(first, UnknownScript):
            # The server does answer: loading the script is not limited by `reconnect_timeout`.
            try:
                return await attempt()
            except _TRANSIENT as error:
                first = error
        return await self._retry(attempt, first)

    async def command(self, *parts: bytes | str | int) -> Any:
        """The reply to a command that may be sent twice."""
        try:
            return await self._connection.command(*parts)
        except _TRANSIENT as error:
            return await self._retry(lambda: self._connection.command(*parts), error)

    async def _retry(self, attempt: Callable[[], Awaitable[Any]], last: StorageError) -> Any:
        """Try until it succeeds, with growing pauses; raises the last error after `reconnect_timeout`."""
        # The first retry is immediate: most often only this connection was lost.
        failures, pause = 0, 0.0
        try:
            async with asyncio.timeout(self._reconnect_timeout or RETRY_SECONDS):
                while True:
                    await SYSTEM_CLOCK.sleep(pause)
                    jitter = SYSTEM_CLOCK.random()
                    pause = backoff(
                        failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE, jitter=jitter
                    )
                    failures += 1
                    try:
                        return await attempt()
                    except _TRANSIENT as error:
                        last = error
        except TimeoutError as error:
            raise last from error

    def _packed(self, name: str, is_repeat: bool, arguments: tuple[Any, ...]) -> bytes:
        start = self._command_starts.get(name)
        if start is None:
            start = self._command_starts[name] = self._command_start(name)
        request = _encode((given_time(self._clock) or 0, int(is_repeat), *arguments))
        return b"%b$%d\r\n%b\r\n" % (start, len(request), request)

    def _command_start(self, name: str) -> bytes:
        """The beginning of the command, which is the same every time."""
        known = script(name, self._largest)
        keys = map(self.key, known.keys)
        return pack("EVALSHA", known.sha, len(known.keys), *keys, more=1)


def _was_sent(error: StorageError) -> bool:
    """Whether the server may have run the call that failed."""
    return isinstance(error, ConnectionLost) and error.was_sent
