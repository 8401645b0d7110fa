"""Transport: keepalives and the size of reads, which the driver has no options for."""

from __future__ import annotations

import socket
from typing import Any, Final

_READ_SIZE: Final = 65_536
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 10, 5, 3


def configure(connection: Any) -> None:
    """Enable TCP keepalives, which detect a silently lost peer, and limit the size of reads."""
    # The driver has no option for keepalives. Without them only a call's timeout detects a lost peer.
    transport = getattr(connection, "_transport", None)
    if transport is not None and hasattr(transport, "max_size"):
        # For every read asyncio allocates its maximum, a quarter of a megabyte, and then shrinks it
        # to what was read: a hundred thousand such reads fragment the heap.
        transport.max_size = _READ_SIZE
    peer = None if transport is None else transport.get_extra_info("socket")
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", 1000 * KEEPALIVE_IDLE),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
