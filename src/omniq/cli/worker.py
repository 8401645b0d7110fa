"""`omniq worker`: run tasks."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from omniq.cli.options import Url
from omniq.errors import SettingsError
from omniq.service import console
from omniq.service.supervisor import Worker
from omniq.settings import Settings


def worker(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE", help="Modules whose functions it runs, and no others."),
    ],
    url: Url = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="Tasks at a time, in each process."),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, help="Processes; 1 is this one.")
    ] = 1,
    queues: Annotated[
        str | None, typer.Option("--queues", "-q", metavar="A,B", help="Only these queues.")
    ] = None,
    poll_interval: Annotated[
        float | None,
        typer.Option("--poll-interval", metavar="S", help="Seconds between looks when idle."),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option("--lease", metavar="S", help="Seconds after which others take over, 0.5 up."),
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(
            "--shutdown-timeout", metavar="S", help="Seconds running tasks get to finish."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", metavar="PORT", help="Serve /metrics, /health, /ready and /scale."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="HOST", help="Where to serve them.")
    ] = "127.0.0.1",
    otel: Annotated[
        bool, typer.Option("--otel", help="Spans for every run, by OpenTelemetry.")
    ] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING, …")
    ] = None,
) -> None:
    """Run the tasks of these modules until told to stop.

    SIGTERM or Ctrl-C: take no more tasks, let what runs finish, give the rest back, exit 0. A
    second one: leave within a second. Any function defined in the modules can be a task; the
    current folder is importable.
    """
    settings = Settings.load(
        url=url,
        concurrency=concurrency,
        poll_interval=poll_interval,
        lease=lease,
        shutdown_timeout=shutdown_timeout,
        log_level=log_level,
    )
    make_current_folder_importable()
    console.start_logging(settings.log_level)
    # A lease that was asked for here comes before one that stands in the URL.
    runner = Worker(
        settings.url,
        modules,
        processes=processes,
        queues=_names(queues),
        lease=lease,
        settings=settings,
        listeners=_listeners(metrics_port, otel),
    )
    if metrics_port is None:
        code = runner.run()
    else:
        from omniq.integrations.endpoint import watched

        with watched(runner, metrics_host, metrics_port) as port:
            console.write(f"metrics on http://{metrics_host}:{port}/metrics\n")
            code = runner.run()
    if runner.wants_restart:
        console.start_anew()
    console.leave(code, at_once=runner.was_cut_off)


def make_current_folder_importable() -> None:
    """Put the current folder first on the path, as `python -m` does."""
    folder = os.getcwd()
    if not {"", folder} & set(sys.path[:1]):
        sys.path.insert(0, folder)


def _listeners(metrics_port: int | None, otel: bool) -> list[str]:
    """What listens in each process. Imported there, and only if it is wanted."""
    if otel and find_spec("opentelemetry") is None:
        raise SettingsError("--otel needs more: pip install 'omniq[otel]'")
    wanted = {
        "omniq.integrations.prometheus.Counters": metrics_port is not None,
        "omniq.integrations.otel.Spans": otel,
    }
    return [path for path, is_wanted in wanted.items() if is_wanted]


def _names(queues: str | None) -> list[str] | None:
    return None if queues is None else [name.strip() for name in queues.split(",")]
