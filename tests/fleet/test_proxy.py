"""The proxy loses exactly what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from omniq.testing.fault_proxy import FaultProxy


class Shouter:
    """A server that answers each line in capitals, and knows what it was asked."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.heard.append(line.decode().strip())
            writer.write(line.upper())
        writer.close()


class Client:
    """Asks through the proxy, over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, proxy: FaultProxy) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2])))

    async def ask(self, line: str) -> str:
        """The answer; empty when the connection has ended."""
        try:
            self._writer.write(f"{line}\n".encode())
            return (await self._reader.readline()).decode().strip()
        except ConnectionError:
            return ""

    async def close(self) -> None:
        self._writer.close()


@pytest.fixture
def shouter() -> Shouter:
    return Shouter()


@pytest.fixture
async def proxy(shouter: Shouter) -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(shouter.serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with FaultProxy(f"tcp://me:secret@127.0.0.1:{port}") as proxy:
        yield proxy
    server.close()


@pytest.fixture
async def client(proxy: FaultProxy) -> AsyncIterator[Client]:
    client = await Client.of(proxy)
    yield client
    await client.close()


async def test_it_passes_on_and_counts(proxy, client):
    assert [await client.ask("a"), await client.ask("b")] == ["A", "B"]
    assert (proxy.counts.connections, proxy.counts.requests, proxy.counts.replies) == (1, 2, 2)
    assert proxy.counts.cuts == 0
    assert proxy.url.startswith("tcp://me:secret@127.0.0.1:")


async def test_a_request_that_is_cut_never_reaches_the_server(proxy, client, shouter):
    proxy.cut("before_request", at=2)

    assert [await client.ask("a"), await client.ask("b")] == ["A", ""]
    assert (shouter.heard, proxy.counts.cuts, proxy.disarm()) == (["a"], 1, True)


async def test_a_reply_that_is_cut_was_given(proxy, client, shouter):
    proxy.cut("before_reply", at=2)

    assert [await client.ask("a"), await client.ask("b")] == ["A", ""]
    assert shouter.heard == ["a", "b"]


async def test_a_connection_that_is_cut_after_a_reply_has_given_it(proxy, client):
    proxy.cut("after_reply")

    assert [await client.ask("a"), await client.ask("b")] == ["A", ""]
    second = await Client.of(proxy)
    assert await second.ask("c") == "C"
    await second.close()


async def test_a_cut_that_has_not_come_can_be_called_off(proxy, client):
    proxy.cut("before_reply", at=2)
    await client.ask("a")

    assert not proxy.disarm()
    assert await client.ask("b") == "B"


async def test_in_a_partition_nothing_passes_until_it_is_healed(proxy, client, shouter):
    proxy.partition()
    asked = asyncio.create_task(client.ask("a"))
    late = await Client.of(proxy)
    asked_late = asyncio.create_task(late.ask("b"))
    done, _ = await asyncio.wait((asked, asked_late), timeout=0.1)
    assert (done, shouter.heard) == (set(), [])
    await proxy.heal()

    assert {await asked, await asked_late} == {"A", "B"}
    await late.close()


async def test_while_it_refuses_nobody_connects(proxy, client):
    await proxy.refuse()

    assert await client.ask("a") == ""
    with pytest.raises(ConnectionRefusedError):
        await Client.of(proxy)
    await proxy.heal()
    second = await Client.of(proxy)
    assert await second.ask("b") == "B"
    await second.close()


async def test_a_delay_holds_up_replies(proxy, client):
    proxy.delay(0.05)
    loop = asyncio.get_running_loop()
    began = loop.time()

    assert await client.ask("a") == "A"
    assert loop.time() - began >= 0.05


async def test_a_cut_can_come_again_and_again(proxy):
    proxy.cut("before_reply", at=2, times=2)
    answers = []
    for _ in range(3):
        client = await Client.of(proxy)
        answers += [await client.ask("a"), await client.ask("b")]
        await client.close()

    assert answers == ["A", "", "A", "", "A", "B"]
    assert proxy.disarm()
