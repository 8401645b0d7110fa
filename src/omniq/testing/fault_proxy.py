"""A loopback TCP proxy in front of a server, which loses, delays or refuses messages for a test.

    async with FaultProxy(server.url) as proxy:
        async with open_storage(proxy.url) as storage:
            proxy.cut("before_reply")     # the server enqueues it, the reply is lost
            await storage.enqueue(task)

The proxy knows no protocol. The bytes of one read from a client count as a request, the bytes of one
read from the server as a reply. On a loopback, where the two sides send alternately, these are the real
requests and replies. A long reply may count as several, and is then lost in part.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

Cut = Literal["before_request", "before_reply", "after_reply"]
"""Where a connection is cut: the server does not receive the request; the server has executed the
request and the reply is lost; or the client has received the reply."""

_CHUNK = 1 << 16


@dataclass
class Counts:
    """The messages that were forwarded and the connections that were cut."""

    connections: int = 0
    requests: int = 0
    replies: int = 0
    cuts: int = 0


class FaultProxy:
    """Forwards all messages until a fault is set. Belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """`url` is the URL of the server, with a host and a port."""
        self._parts = urlsplit(url)
        self.counts = Counts()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._connections: set[_Connection] = set()
        self._planned_cuts: dict[Cut, _PlannedCut] = {}
        self._delay = 0.0
        self._forwarding = asyncio.Event()
        self._forwarding.set()

    @property
    def url(self) -> str:
        """The URL of the server through this proxy."""
        user, at, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{user}{at}127.0.0.1:{self._port}"))

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
            self._port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Cut all connections and stop listening."""
        await self._refuse()
        self._forwarding.set()

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
        """Cut the connection that carries the `at`-th request or reply from now on.

        Counting restarts after each cut, until there were `times` cuts.
        """
        self._planned_cuts[where] = _PlannedCut(at, at, times)

    def cancel_cuts(self) -> bool:
        """Cancel the planned cuts that have not happened. Returns True if there were none."""
        was_empty = not self._planned_cuts
        self._planned_cuts.clear()
        return was_empty

    def cut_all(self) -> None:
        """Cut every connection now."""
        for connection in list(self._connections):
            self._cut(connection)

    def delay(self, seconds: float) -> None:
        """Delay every reply by this time from now on."""
        self._delay = seconds

    def partition(self) -> None:
        """Forward nothing, without an error: connections stay open, new ones are accepted."""
        self._forwarding.clear()

    async def refuse(self) -> None:
        """Cut all connections and refuse new ones."""
        await self._refuse()

    async def heal(self) -> None:
        """Forward all messages again; those that a partition delayed arrive late."""
        self._planned_cuts.clear()
        self._delay = 0.0
        self._forwarding.set()
        await self.start()

    # Forwarding

    async def _refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        tasks = [connection.task for connection in self._connections]
        self.cut_all()
        if tasks:
            await asyncio.wait(tasks)
        # Not `wait_closed` before the connections have ended: some versions of Python wait for them.
        if listener is not None:
            await listener.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(task, writer)
        self._connections.add(connection)
        try:
            await self._connect_and_forward(connection, reader)
        except (OSError, asyncio.CancelledError):
            # One side has disconnected, or the connection was cut: the other side is closed below.
            pass
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _connect_and_forward(
        self, connection: _Connection, from_client: asyncio.StreamReader
    ) -> None:
        await self._forwarding.wait()
        host, port = self._parts.hostname or "127.0.0.1", self._parts.port
        from_server, connection.to_server = await asyncio.open_connection(host, port)
        forwarders = [
            asyncio.create_task(
                self._forward_requests(connection, from_client, connection.to_server)
            ),
            asyncio.create_task(self._forward_replies(connection, from_server)),
        ]
        try:
            await asyncio.wait(forwarders, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for forwarder in forwarders:
                forwarder.cancel()
            await asyncio.gather(*forwarders, return_exceptions=True)

    async def _forward_requests(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._forwarding.wait()
            self.counts.requests += 1
            if self._count_and_check("before_request"):
                self._cut(connection)
                return
            writer.write(chunk)
            await writer.drain()

    async def _forward_replies(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_CHUNK):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._forwarding.wait()
            self.counts.replies += 1
            if self._count_and_check("before_reply"):
                self._cut(connection)
                return
            is_last = self._count_and_check("after_reply")
            connection.to_client.write(chunk)
            await connection.to_client.drain()
            if is_last:
                self._cut(connection)
                return

    def _count_and_check(self, where: Cut) -> bool:
        """Count a message, and return whether a planned cut applies to it."""
        planned = self._planned_cuts.get(where)
        if planned is None:
            return False
        planned.left -= 1
        if planned.left:
            return False
        planned.times -= 1
        planned.left = planned.at
        if not planned.times:
            del self._planned_cuts[where]
        return True

    def _cut(self, connection: _Connection) -> None:
        self.counts.cuts += 1
        connection.task.cancel()


@dataclass
class _PlannedCut:
    """A planned cut: at every `at`-th message, `left` messages from now, `times` times."""

    at: int
    left: int
    times: int


@dataclass(eq=False)
class _Connection:
    """A client's connection and the connection to the server that belongs to it."""

    task: asyncio.Task[None]
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter | None = None

    def close(self) -> None:
        for writer in (self.to_client, self.to_server):
            if writer is not None:
                with suppress(RuntimeError):
                    writer.close()
