"""`omniq worker`: run tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.options import Url
from omniq.cli.worker_exec import WorkerCommand


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
) -> WorkerCommand:
    """Run the tasks of these modules until told to stop.

    SIGTERM or Ctrl-C: take no more tasks, let what runs finish, give the rest back, exit 0. A
    second one: leave within a second. Any function defined in the modules can be a task; the
    current folder is importable.
    """
    return WorkerCommand(
        modules=modules,
        processes=processes,
        url=url,
        concurrency=concurrency,
        queues=None if queues is None else [name.strip() for name in queues.split(",")],
        poll_interval=poll_interval,
        lease=lease,
        shutdown_timeout=shutdown_timeout,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        otel=otel,
        log_level=log_level,
    )
