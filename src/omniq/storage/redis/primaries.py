"""Finds the server that has the store: through Sentinels, or through the servers of a cluster."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from omniq.storage.redis.address import Address, Node

_ASK_SECONDS = 1.0
"""How long one Sentinel or server may take to name the primary; then the next one is asked."""

_SLOTS = 16_384

Ask = Callable[..., Awaitable[Any]]
"""Connects to a server, sends one command, and returns its reply: `ask(node, *command)`."""


class UnknownService(Exception):
    """A Sentinel does not know the service that the URL names."""


class Primaries:
    """The servers that may have the store, as they are known now."""

    def __init__(self, address: Address, hash_tag: str) -> None:
        self._address = address
        self._slot = slot_of(hash_tag)
        self._nodes = list(address.nodes)
        self._learned: Node | None = None

    def note(self, node: Node) -> None:
        """A server of the cluster has named the one that has the store."""
        self._learned = node

    async def find(self, ask: Ask) -> AsyncGenerator[Node]:
        """The servers to try, in order; raises the last error if none is named."""
        if self._address.kind == "server":
            yield Node(self._address.host, self._address.port)
            return
        learned, self._learned = self._learned, None
        if learned is not None:
            yield learned
        tried: set[Node] = set() if learned is None else {learned}
        last: Exception | None = None
        for node in list(self._nodes):
            try:
                async with asyncio.timeout(_ASK_SECONDS):
                    named = await self._named_by(node, ask)
            except TimeoutError:
                last = TimeoutError(f"{node.host}:{node.port} did not answer")
            except Exception as error:
                last = error
            else:
                # The next search begins with the one that has answered.
                self._nodes.sort(key=node.__ne__)
                if named not in tried:
                    tried.add(named)
                    yield named
        if last is not None and not tried:
            raise last

    async def _named_by(self, node: Node, ask: Ask) -> Node:
        if self._address.kind == "sentinel":
            service = self._address.service
            reply = await ask(node, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
            if reply is None:
                raise UnknownService(
                    f"the Sentinel {node.host}:{node.port} knows no service {service!r}: "
                    "is the name at the end of the URL right?"
                )
            return Node(reply[0].decode(), int(reply[1]))
        return self._owner_of_the_slot(node, await ask(node, "CLUSTER", "SLOTS"))

    def _owner_of_the_slot(self, asked: Node, reply: Any) -> Node:
        """The server that has the store; all others are remembered, for when this one is gone."""
        found = None
        nodes = [asked]
        for first, last, *servers in reply:
            # A server that does not know its own host leaves it out.
            known = [Node((host or b"").decode() or asked.host, port) for host, port, *_ in servers]
            nodes += known
            if first <= self._slot <= last:
                found = known[0]
        self._nodes = list(dict.fromkeys((*nodes, *self._address.nodes)))
        if found is None:
            raise LookupError(
                f"no server has slot {self._slot}, as {asked.host}:{asked.port} knows the cluster"
            )
        return found


def slot_of(hash_tag: str) -> int:
    """The slot of a cluster that has all keys with that hash tag.

    >>> slot_of("123456789")
    12739
    """
    return binascii.crc_hqx(hash_tag.encode(), 0) % _SLOTS
