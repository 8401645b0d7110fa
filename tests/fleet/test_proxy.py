"""The proxy loses exactly the messages that the test names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omniq.testing.fault_proxy import FaultProxy


class UppercaseServer:
    """A server that answers each line in capitals and records the lines."""

    def __init__(self) -> None:
        self.received: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.received.append(line.decode().strip())
            writer.write(line.upper())
        writer.close()


class Client:
    """Sends lines through the proxy, over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, proxy: FaultProxy) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2])))

    async def send(self, line: str) -> str:
        """Send a line and return the answer; it is empty if the connection has ended."""
        try:
            self._writer.write(f"{line}\n".encode())
            return (await self._reader.readline()).decode().strip()
        except ConnectionError:
            return ""

    async def close(self) -> None:
        self._writer.close()


@pytest.fixture
def uppercase_server() -> UppercaseServer:
    return UppercaseServer()


@pytest.fixture
async def proxy(uppercase_server: UppercaseServer) -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(uppercase_server.serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with FaultProxy(f"tcp://me:secret@127.0.0.1:{port}") as proxy:
        yield proxy
    server.close()


@pytest.fixture
async def client(proxy: FaultProxy) -> AsyncIterator[Client]:
    client = await Client.of(proxy)
    yield client
    await client.close()


async def test_the_proxy_forwards_and_counts_messages(proxy, client):
    assert [await client.send("a"), await client.send("b")] == ["A", "B"]
    assert (proxy.counts.connections, proxy.counts.requests, proxy.counts.replies) == (1, 2, 2)
    assert proxy.counts.cuts == 0
    assert proxy.url.startswith("tcp://me:secret@127.0.0.1:")


async def test_a_cut_request_does_not_reach_the_server(proxy, client, uppercase_server):
    proxy.cut("before_request", at=2)

    assert [await client.send("a"), await client.send("b")] == ["A", ""]
    assert (uppercase_server.received, proxy.counts.cuts, proxy.cancel_cuts()) == (["a"], 1, True)


async def test_the_server_has_sent_a_reply_that_is_cut(proxy, client, uppercase_server):
    proxy.cut("before_reply", at=2)

    assert [await client.send("a"), await client.send("b")] == ["A", ""]
    assert uppercase_server.received == ["a", "b"]


async def test_a_connection_cut_after_a_reply_delivers_the_reply(proxy, client):
    proxy.cut("after_reply")

    assert [await client.send("a"), await client.send("b")] == ["A", ""]
    second = await Client.of(proxy)
    assert await second.send("c") == "C"
    await second.close()


async def test_a_planned_cut_can_be_cancelled(proxy, client):
    proxy.cut("before_reply", at=2)
    await client.send("a")

    assert not proxy.cancel_cuts()
    assert await client.send("b") == "B"


async def test_in_a_partition_no_message_passes_until_it_is_healed(proxy, client, uppercase_server):
    proxy.partition()
    sent = asyncio.create_task(client.send("a"))
    late = await Client.of(proxy)
    sent_late = asyncio.create_task(late.send("b"))
    done, _ = await asyncio.wait((sent, sent_late), timeout=0.1)
    assert (done, uppercase_server.received) == (set(), [])
    await proxy.heal()

    assert {await sent, await sent_late} == {"A", "B"}
    await late.close()


async def test_while_the_proxy_refuses_no_client_connects(proxy, client):
    await proxy.refuse()

    assert await client.send("a") == ""
    with pytest.raises(ConnectionRefusedError):
        await Client.of(proxy)
    await proxy.heal()
    second = await Client.of(proxy)
    assert await second.send("b") == "B"
    await second.close()


async def test_a_delay_postpones_replies(proxy, client):
    proxy.delay(0.05)
    loop = asyncio.get_running_loop()
    began = loop.time()

    assert await client.send("a") == "A"
    assert loop.time() - began >= 0.05


async def test_a_cut_can_be_repeated(proxy):
    proxy.cut("before_reply", at=2, times=2)
    answers = []
    for _ in range(3):
        client = await Client.of(proxy)
        answers += [await client.send("a"), await client.send("b")]
        await client.close()

    assert answers == ["A", "", "A", "", "A", "B"]
    assert proxy.cancel_cuts()
