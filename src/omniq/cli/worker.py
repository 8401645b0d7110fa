"""`omniq worker`: run tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from omniq.cli.options import Url
from omniq.cli.worker_exec import WorkerCommand


def worker(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE", help="Modules whose functions this worker may run."),
    ],
    url: Url = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="Number of tasks that each process runs at a time."
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            help="Number of worker processes; 1 starts no other process.",
        ),
    ] = 1,
    queues: Annotated[
        str | None,
        typer.Option("--queues", "-q", metavar="A,B", help="Claim from these queues only."),
    ] = None,
    poll_interval: Annotated[
        float | None,
        typer.Option(
            "--poll-interval", metavar="S", help="Polling interval when idle, in seconds."
        ),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            "--lease",
            metavar="S",
            help="Seconds until other workers take over the tasks of a dead worker; at least 0.5.",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(
            "--shutdown-timeout",
            metavar="S",
            help="Seconds that running tasks have to finish after a stop.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", metavar="PORT", help="Serve /metrics, /health, /ready and /scale."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="HOST", help="Address to serve them on.")
    ] = "127.0.0.1",
    metrics_names: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics-name",
            metavar="NAME",
            help="A host name by which clients may request them, besides addresses and localhost; "
            "repeatable.",
        ),
    ] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="Record an OpenTelemetry span for each run.")
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level", metavar="LEVEL", help="Lowest level to log: DEBUG, INFO, WARNING, …"
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--log-format", metavar="text|json", help="Lines for people, or one JSON object each."
        ),
    ] = None,
) -> WorkerCommand:
    """Run the tasks of these modules until stopped.

    On SIGTERM or Ctrl-C it claims no more tasks, lets running tasks finish, releases those that
    do not finish in time, and exits with 0. A second signal ends it within a second.

    It runs the functions that the modules define, except those whose name begins with an underscore,
    and those marked with `@task` in modules below them. A module in the current folder is used if it
    has the name; other imports find that folder last, and not at all with PYTHONSAFEPATH.
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
        metrics_names=metrics_names or [],
        otel=otel,
        log_level=log_level,
        log_format=log_format,
    )
