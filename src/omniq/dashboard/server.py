"""Serves the dashboard as a separate process, on loopback only unless credentials are set."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import uvicorn

from omniq.dashboard.app import create_app
from omniq.dashboard.app_state import AppState
from omniq.dashboard.authentication import OPERATOR_VARIABLE, VIEWER_VARIABLE, Access
from omniq.dashboard.connections import ConnectionLimits, silence_warnings
from omniq.errors import SettingsError
from omniq.queue.async_queue import AsyncTaskQueue

_SHUTDOWN_SECONDS = 3
_BACKLOG = 128


class _Server(uvicorn.Server):
    """Stops on SIGINT and SIGTERM without raising the signal again, unlike uvicorn's server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.should_exit = True


def check_host(host: str, access: Access) -> None:
    """Raise `SettingsError` if other machines could reach the dashboard without credentials."""
    if not is_loopback(host) and not access.has_credentials:
        raise SettingsError(
            f"host {host}: other machines could reach the dashboard. Set {OPERATOR_VARIABLE} "
            f"(and {VIEWER_VARIABLE} for read-only access) to a secret of 12 characters or more, "
            "or omit --host"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address.

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
    queue: AsyncTaskQueue,
    host: str,
    port: int,
    access: Access,
    print_line: Callable[[str], None],
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Calls `print_line` with the address, or with each link.

    A link makes its bearer an operator. So it is printed for a person at a terminal only, never
    into the log of a service.
    """
    check_host(host, access)
    uses_links = not access.has_secrets
    if uses_links and not _is_terminal(sys.stdout):
        raise SettingsError(
            "the dashboard prints its sign-in link to a terminal only, and there is none. Set "
            f"{OPERATOR_VARIABLE} (and {VIEWER_VARIABLE} for read-only access) to a secret of 12 "
            "characters or more"
        )
    listener = _listen(host, port)
    app = create_app(queue, access=access)
    state: AppState = app.state.dashboard
    root = f"http://{_in_url(host)}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        http=(limits or ConnectionLimits()).protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    silence_warnings()
    server = _Server(config)
    if not uses_links:
        print_line(f"{root}/")
        await _run(server, listener, state)
        return
    with _links_on_request(lambda: print_line(f"{root}/login?token={state.sessions.new_link()}")):
        await _run(server, listener, state)


@contextmanager
def _links_on_request(print_link: Callable[[], None]) -> Iterator[None]:
    """Print a link now, and another one each time that Enter is pressed."""
    print_link()
    if not _is_terminal(sys.stdin):
        yield
        return
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def read_line() -> None:
        # An empty read is the end of the input: then nothing more will come.
        if os.read(descriptor, 4096):
            print_link()
        else:
            loop.remove_reader(descriptor)

    loop.add_reader(descriptor, read_line)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


async def _run(server: uvicorn.Server, listener: socket.socket, state: AppState) -> None:
    """Serve until the server stops; meanwhile post alerts to the webhook, if there is one."""
    posting = None if state.alerts is None else asyncio.create_task(state.alerts.run())
    try:
        await asyncio.gather(server.serve([listener]), _end_streams(server, state))
    finally:
        if posting is not None:
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)


async def _end_streams(server: uvicorn.Server, state: AppState) -> None:
    """End live streams at shutdown: the server waits for its connections to close."""
    while not server.should_exit:
        await state.clock.sleep(0.2)
    await state.close()


def _listen(host: str, port: int) -> socket.socket:
    name = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it, each response waits for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((name, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {name} port {port}: {error.strerror or error}; "
            "choose another --port, or 0 for any free port"
        ) from error
    return listener


def _in_url(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
