"""`omniq dashboard`: the queue in a browser."""

from __future__ import annotations

from typing import Annotated

from omniq.cli import output
from omniq.cli.command import Option
from omniq.cli.options import Url
from omniq.cli.queue_session import CommandFailed, with_queue
from omniq.log import LogConfig
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.settings import Settings
from omniq.worker.process import console


def dashboard(
    url: Url = None,
    host: Annotated[
        str,
        Option(
            "--host",
            help="Address to listen on; one that other machines can reach requires credentials.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0 picks a free port."),
    ] = 8484,
    read_only: Annotated[bool, Option("--read-only", help="Allow no changes.")] = False,
    names: Annotated[
        list[str] | None,
        Option("--name", metavar="HOST", help="A host name that browsers may use; repeatable."),
    ] = None,
    proxies: Annotated[
        list[str] | None,
        Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are "
            "believed; repeatable.",
        ),
    ] = None,
    https: Annotated[
        bool, Option("--https", help="Browsers use TLS: a proxy in front terminates it.")
    ] = False,
) -> None:
    """Show the queue in a browser, where operators can also manage it.

    Prints a sign-in link that works once, for ten minutes; press Enter for a new one. Links are
    printed to a terminal only. With secrets in OMNIQ_DASHBOARD_OPERATOR and
    OMNIQ_DASHBOARD_VIEWER, users sign in with these instead.
    """
    try:
        from omniq.dashboard.authentication import Access
        from omniq.dashboard.server import check_host, serve
    except ImportError as error:
        raise CommandFailed(
            f"the dashboard needs {error.name}: pip install 'omniq[dashboard]'"
        ) from error
    hosts = tuple(names or ()) + ((host,) if host not in ("0.0.0.0", "::", "") else ())
    access = Access.from_environment(
        hosts=hosts, read_only=read_only, trusted_proxies=tuple(proxies or ()), https=https
    )
    check_host(host, access)
    console.start_logging(LogConfig.of(Settings.load(url=url)))

    async def work(task_queue: AsyncTaskQueue) -> None:
        await serve(task_queue, host, port, access, _print_link)

    with_queue(url, work, creates=True)


def _print_link(link: str) -> None:
    """Print a link alone on its line, unwrapped, and flush it so that a pipe gets it immediately."""
    output.print_line(link)
    console.flush()
