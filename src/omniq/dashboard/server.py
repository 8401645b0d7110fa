"""Serves the dashboard from a process of its own, on this machine unless credentials are set."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from omniq.dashboard.app import create_app
from omniq.dashboard.app_state import AppState
from omniq.dashboard.authentication import OPERATOR_VARIABLE, VIEWER_VARIABLE, Access
from omniq.errors import SettingsError
from omniq.queue.async_queue import AsyncTaskQueue

_PATIENCE = 3
_BACKLOG = 128


class _Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM, as asked, and not by raising the signal once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self.should_exit = True


def check_host(host: str, access: Access) -> None:
    """Refuse to listen where others can reach it, unless they have to say who they are."""
    if not is_loopback(host) and not access.has_credentials:
        raise SettingsError(
            f"host {host}: others could reach the dashboard there. Set {OPERATOR_VARIABLE} "
            f"(and {VIEWER_VARIABLE}, for those who may only look) to a secret of 12 characters "
            "or more, or leave --host out"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "", "a.b")]
    [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def serve(
    queue: AsyncTaskQueue, host: str, port: int, access: Access, say: Callable[[str], None]
) -> None:
    """Serve until a signal comes. `say` is told each link, alone."""
    check_host(host, access)
    listener = _listen(host, port)
    app = create_app(queue, access=access)
    state: AppState = app.state.dashboard
    root = f"http://{_in_url(host)}:{listener.getsockname()[1]}"

    def tell_link() -> None:
        say(f"{root}/login?token={state.sessions.new_link()}")

    if access.operator is None and access.viewer is None:
        tell_link()
        # Each link opens once; whoever comes next finds a fresh one in the terminal.
        state.sessions.on_link_used = tell_link
    else:
        say(f"{root}/")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_PATIENCE,
    )
    server = _Server(config)
    await asyncio.gather(server.serve([listener]), _end_streams(server, state))


async def _end_streams(server: uvicorn.Server, state: AppState) -> None:
    """The server waits for its connections, and a live stream does not end by itself."""
    while not server.should_exit:
        await state.clock.sleep(0.2)
    await state.sampler.close()


def _listen(host: str, port: int) -> socket.socket:
    name = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((name, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {name} port {port}: {error.strerror or error}; "
            "another --port, or 0 for any that is free"
        ) from error
    return listener


def _in_url(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
