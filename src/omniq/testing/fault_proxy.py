"""A loopback TCP proxy before a server, which loses what it is told to lose.

    async with FaultProxy(server.url) as proxy:
        async with open_storage(proxy.url) as storage:
            proxy.cut("before_reply")     # done by the server, and the reply is lost
            await storage.enqueue(task)

It knows no protocol. What one read brings from a client counts as a request, what one read brings
from the server as a reply; on a loopback, where both sides take turns, that is what they are. A
long reply may count as several, and is then lost in part.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

Cut = Literal["before_request", "before_reply", "after_reply"]
"""Where a connection ends: the server never hears of the request; it has done what was asked and
the reply is lost; or right after the reply has arrived."""

_CHUNK = 1 << 16


@dataclass
class Counts:
    """What has passed, and what has been cut."""

    connections: int = 0
    requests: int = 0
    replies: int = 0
    cuts: int = 0


class FaultProxy:
    """Passes everything on, until told otherwise. Belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """Before the server of `url`, which has a host and a port."""
        self._parts = urlsplit(url)
        self.counts = Counts()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._links: set[_Link] = set()
        self._plan: dict[Cut, _Planned] = {}
        self._delay = 0.0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def url(self) -> str:
        """The server's URL, by way of this proxy."""
        user, at, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{user}{at}127.0.0.1:{self._port}"))

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
            self._port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Cut everything and listen no more."""
        await self._refuse()
        self._open.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # Faults

    def cut(self, where: Cut, at: int = 1, *, times: int = 1) -> None:
        """Cut the connection on which, from now on, the `at`-th request or reply comes by.

        Counted anew after each cut until there were `times` of them.
        """
        self._plan[where] = _Planned(at, at, times)

    def disarm(self) -> bool:
        """Forget the cuts that have not come; whether all of them had."""
        all_came = not self._plan
        self._plan.clear()
        return all_came

    def cut_all(self) -> None:
        """Cut every connection now."""
        for link in list(self._links):
            self._sever(link)

    def delay(self, seconds: float) -> None:
        """Let every reply wait so long, from now on."""
        self._delay = seconds

    def partition(self) -> None:
        """Let nothing pass, and say so to nobody: connections stay, new ones are taken and silent."""
        self._open.clear()

    async def refuse(self) -> None:
        """Cut everything, and take no connections."""
        await self._refuse()

    async def heal(self) -> None:
        """Pass everything on again; what a partition held up arrives late."""
        self._plan.clear()
        self._delay = 0.0
        self._open.set()
        await self.start()

    # Passing on

    async def _refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        tasks = [link.task for link in self._links]
        self.cut_all()
        if tasks:
            await asyncio.wait(tasks)
        # Not `wait_closed` before the links have gone: some versions of Python wait for them.
        if listener is not None:
            await listener.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        task = asyncio.current_task()
        assert task is not None
        link = _Link(task, writer)
        self._links.add(link)
        try:
            await self._connect_and_pass(link, reader)
        except (OSError, asyncio.CancelledError):
            # One side is gone, or the link was cut: the other side sees the end of its connection.
            pass
        finally:
            self._links.discard(link)
            link.close()

    async def _connect_and_pass(self, link: _Link, from_client: asyncio.StreamReader) -> None:
        await self._open.wait()
        host, port = self._parts.hostname or "127.0.0.1", self._parts.port
        from_server, link.to_server = await asyncio.open_connection(host, port)
        pumps = [
            asyncio.create_task(self._pass_requests(link, from_client, link.to_server)),
            asyncio.create_task(self._pass_replies(link, from_server)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pass_requests(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._open.wait()
            self.counts.requests += 1
            if self._is_due("before_request"):
                self._sever(link)
                return
            writer.write(chunk)
            await writer.drain()

    async def _pass_replies(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_CHUNK):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._open.wait()
            self.counts.replies += 1
            if self._is_due("before_reply"):
                self._sever(link)
                return
            is_last = self._is_due("after_reply")
            link.to_client.write(chunk)
            await link.to_client.drain()
            if is_last:
                self._sever(link)
                return

    def _is_due(self, where: Cut) -> bool:
        planned = self._plan.get(where)
        if planned is None:
            return False
        planned.left -= 1
        if planned.left:
            return False
        planned.times -= 1
        planned.left = planned.at
        if not planned.times:
            del self._plan[where]
        return True

    def _sever(self, link: _Link) -> None:
        self.counts.cuts += 1
        link.task.cancel()


@dataclass
class _Planned:
    """A cut to come: at every `at`-th message, `left` messages from now, so many `times`."""

    at: int
    left: int
    times: int


@dataclass(eq=False)
class _Link:
    """A client's connection and the one to the server that belongs to it."""

    task: asyncio.Task[None]
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter | None = None

    def close(self) -> None:
        for writer in (self.to_client, self.to_server):
            if writer is not None:
                with suppress(RuntimeError):
                    writer.close()
