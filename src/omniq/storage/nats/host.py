"""The host: the process that runs the calls of all other processes on its replica.

A stored message names the host, and is replaced by compare-and-set. The name is only a hint: if two
processes both act as the host, they append to the same log, and the log decides. This needs no lease and
no clock; a wrong hint costs time, but loses no task.

A caller detects that the host has exited because its subject has no subscriber, and that it does not
respond because an empty request gets no reply. A call without a reply is sent again with the same id: the
same host replies from memory, and on another host the rules recognize work that is already done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import OmniqError, StorageError
from omniq.failpoints import hit
from omniq.serialization import encode_internal
from omniq.storage.nats.api_errors import ApiError, NoResponders, Unanswered
from omniq.storage.nats.calls import Call, decode_call
from omniq.storage.nats.replies import Reply, error_reply
from omniq.storage.nats.stream_log import StreamLog

_PATIENCE = 2.0
"""Seconds without a reply after which a host is replaced."""

_FIRST_LOOK = 0.1
"""Seconds after which a caller checks that the host responds."""

_REPEAT_SECONDS = 1.0
"""Seconds after which a caller repeats a call to a host that responds."""

_TRY_SECONDS = 15.0
"""Seconds for which a call tries to find a host that responds."""

_WATCH_SECONDS = 1.0
"""Seconds between two attempts of a dedicated host to become the host."""

_ONLY = "only-"
"""The prefix of the names of dedicated hosts: while one responds, no other process becomes the host."""

_KEPT_BYTES = 32 << 20
"""The most bytes of replies that a host keeps for repeated calls."""

RunCall = Callable[[Call], Awaitable[tuple[Any, int | None]]]
"""Runs a call on the replica of this process; returns its value, and when a task becomes visible."""


class Host:
    """Finds the host of a store, or becomes it. Used in the event loop of the log."""

    def __init__(self, log: StreamLog, mode: str, run_call: RunCall) -> None:
        self.is_here = False
        """Whether this process is the host."""
        self._log = log
        self._mode = mode
        self._run_call = run_call
        self._own = (_ONLY if mode == "only" else "") + SYSTEM_CLOCK.new_id()
        self._known = ""
        self._electing = asyncio.Lock()
        self._answers: dict[str, asyncio.Task[bytes]] = {}
        self._sizes: dict[str, int] = {}
        self._pieces: dict[str, bytes] = {}

    async def open(self) -> None:
        """Find the host. Become it if there is none, or if this process is a dedicated host."""
        await self._log.connection.subscribe(f"{self._log.subject}.hosts", self._on_another)
        if self._mode == "only":
            await self._take_over()
            self._log.connection.start(self._watch())
        else:
            await self._find("")

    async def _take_over(self) -> None:
        """Become the host, unless another dedicated host is."""
        host, sequence = await self._log.read_host()
        if host.startswith(_ONLY) and host != self._own and await self._answers_as(host):
            self._known = host
        else:
            await self._become(sequence)

    async def _watch(self) -> None:
        while True:
            await SYSTEM_CLOCK.sleep(_WATCH_SECONDS)
            # After an outage, the next attempt finds the host.
            with suppress(StorageError):
                if not self.is_here:
                    await self._take_over()

    # Calling

    async def call(self, data: bytes) -> bytes | None:
        """The host's reply to a call; None if this process is the host."""
        failure: StorageError | None = None
        began = SYSTEM_CLOCK.monotonic()
        while SYSTEM_CLOCK.monotonic() - began < _TRY_SECONDS:
            if self.is_here:
                return None
            known = self._known
            try:
                return await self._ask(known, data)
            except (NoResponders, Unanswered) as error:
                failure = error
                try:
                    await self._find(known)
                except NoResponders as missing:
                    # This process must not become the host.
                    failure = missing
                    await SYSTEM_CLOCK.sleep(_FIRST_LOOK)
                except (Unanswered, ApiError) as outage:
                    failure = outage
                    await SYSTEM_CLOCK.sleep(_FIRST_LOOK)
        raise StorageError(
            f"{failure}; the change may have been stored; it can be repeated"
        ) from failure

    async def _ask(self, host: str, data: bytes) -> bytes:
        """The reply of that host. Raises `Unanswered` or `NoResponders` if it does not respond."""
        subject = self._subject(host)
        while True:
            asked = asyncio.ensure_future(self._log.connection.exchange(subject, data))
            try:
                done, _ = await asyncio.wait([asked], timeout=_FIRST_LOOK)
                if not done:
                    await self._log.connection.request(subject, seconds=_PATIENCE)
                    done, _ = await asyncio.wait([asked], timeout=_REPEAT_SECONDS)
                if done:
                    return asked.result()
            finally:
                asked.cancel()
            # The host responds, and its reply may be lost: ask again.

    # Finding

    async def _find(self, missing: str) -> None:
        """Find the host that has replaced `missing`; become the host if there is none."""
        async with self._electing:
            if self.is_here or self._known != missing:
                # Another call has found the host meanwhile.
                return
            host, sequence = await self._log.read_host()
            if host not in ("", missing) and await self._answers_as(host):
                self._known = host
            elif self._mode == "never":
                raise NoResponders("no process hosts this store: start a worker, or `omniq host`")
            else:
                await self._become(sequence)

    async def _answers_as(self, host: str) -> bool:
        try:
            await self._log.connection.request(self._subject(host), seconds=_PATIENCE)
        except (NoResponders, Unanswered):
            return False
        return True

    async def _become(self, sequence: int) -> None:
        """Become the host, unless another process was first; then use that one."""
        # Subscribe first, so that a process that reads the name can reach this one.
        await self._log.connection.subscribe(self._subject(self._own), self._on_call)
        hit("nats.before_host")
        if await self._log.write_host(self._own, sequence):
            self._known, self.is_here = self._own, True
            self._log.connection.publish(f"{self._log.subject}.hosts", self._own.encode())
            return
        self._known = (await self._log.read_host())[0]

    def _on_another(self, data: bytes, reply: str) -> None:
        """Another process is the host now."""
        self._known, self.is_here = data.decode(), False

    def _subject(self, host: str) -> str:
        return f"{self._log.subject}.call.{host or 'none'}"

    async def leave(self) -> None:
        """Stop being the host: the next call of any process elects another."""
        if self.is_here:
            self.is_here = False
            with suppress(StorageError):
                await self._log.connection.unsubscribe(self._subject(self._own))

    # Serving

    def _on_call(self, data: bytes, reply: str) -> None:
        if not data:
            self._log.connection.publish(reply, b"")
            return
        piece, data = self._pieces.pop(reply, b""), data
        if data[:1] == b"\x01":
            self._pieces[reply] = piece + data[1:]
            return
        self._log.connection.start(self._serve(piece + data[1:], reply))

    async def _serve(self, data: bytes, reply: str) -> None:
        try:
            call: Call = decode_call(data)
        except OmniqError as error:
            unknown = StorageError(
                f"the host does not know this call; does it run an older omniq? {error}"
            )
            await self._log.connection.answer(reply, encode_internal(error_reply(unknown)))
            return
        known = self._answers.get(call.id)
        if known is None:
            known = self._answers[call.id] = asyncio.ensure_future(self._answer(call))
        answer = await asyncio.shield(known)
        self._keep(call.id, len(answer))
        hit("nats.before_answer")
        await self._log.connection.answer(reply, answer)

    async def _answer(self, call: Call) -> bytes:
        try:
            value, next_due = await self._run_call(call)
            return encode_internal(Reply(msgspec.Raw(encode_internal(value)), next_due))
        except Exception as error:
            # Raised to the caller, in its process.
            return encode_internal(error_reply(error))

    def _keep(self, call_id: str, size: int) -> None:
        """Keep the reply in case the call is repeated, and drop the oldest replies."""
        self._sizes[call_id] = size + 500
        total = sum(self._sizes.values()) if len(self._sizes) % 64 == 0 else 0
        while total > _KEPT_BYTES:
            oldest = next(iter(self._sizes))
            total -= self._sizes.pop(oldest)
            self._answers.pop(oldest, None)
