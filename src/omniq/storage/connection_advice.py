"""What to do about a server that does not answer: the end of an error's text."""

from __future__ import annotations

import errno
import socket
import ssl


def connect_timeout(seconds: float, *, tls: bool) -> TimeoutError:
    """The error for a server that accepts no connection within that time."""
    advice = "does it speak TLS?" if tls else "is the port right, and does a firewall block it?"
    return TimeoutError(f"no connection within {seconds:g} s; {advice}")


def network_advice(error: BaseException) -> str:
    """The advice for an error of the network, with "; " before it; empty for other errors.

    >>> network_advice(ConnectionRefusedError(111, "Connect call failed"))
    '; nothing listens there: is the server running, and are host and port right?'
    """
    if isinstance(error, socket.gaierror):
        return "; is the name of the host right?"
    if isinstance(error, ssl.SSLError):
        return "; does the server speak TLS on this port, and is its certificate trusted here?"
    # With several addresses of a host asyncio raises one error without a number, with all texts.
    refused = isinstance(error, OSError) and (
        error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(error)
    )
    if refused:
        return "; nothing listens there: is the server running, and are host and port right?"
    return ""
