"""`omniq worker`: run tasks."""

from __future__ import annotations

from typing import Annotated, NoReturn

from omniq.cli.command import Argument, Option
from omniq.cli.options import Url
from omniq.cli.worker_exec import WorkerCommand
from omniq.settings import Settings


def _default(name: str) -> str:
    return f"Default: the setting {name}, else {getattr(Settings(), name):g}."


def worker(
    modules: Annotated[
        list[str] | None,
        Argument(
            metavar="MODULE",
            help="Modules whose functions this worker may run. Default: the setting modules.",
        ),
    ] = None,
    url: Url = None,
    concurrency: Annotated[
        int | None,
        Option(
            "--concurrency",
            "-c",
            min=1,
            help=f"Number of tasks that each process runs at a time. {_default('concurrency')}",
        ),
    ] = None,
    processes: Annotated[
        int,
        Option(
            "--processes",
            "-p",
            min=1,
            help="Number of worker processes; 1 starts no other process.",
        ),
    ] = 1,
    queues: Annotated[
        str | None,
        Option("--queues", "-q", metavar="A,B", help="Claim from these queues only."),
    ] = None,
    poll_interval: Annotated[
        float | None,
        Option(
            "--poll-interval",
            metavar="S",
            help=f"Polling interval when idle, in seconds. {_default('poll_interval')}",
        ),
    ] = None,
    lease: Annotated[
        float | None,
        Option(
            "--lease",
            metavar="S",
            help="Seconds until other workers take over the tasks of a dead worker; at least 0.5. "
            f"{_default('lease')}",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        Option(
            "--shutdown-timeout",
            metavar="S",
            help="Seconds that running tasks have to finish after a stop. "
            f"{_default('shutdown_timeout')}",
        ),
    ] = None,
    max_tasks_per_child: Annotated[
        int | None,
        Option(
            "--max-tasks-per-child",
            metavar="N",
            min=1,
            help="Replace a process when it has run N tasks. Default: the setting max_tasks_per_child, else never.",
        ),
    ] = None,
    max_memory_per_child: Annotated[
        int | None,
        Option(
            "--max-memory-per-child",
            metavar="BYTES",
            min=1,
            help="Replace a process that uses more memory, between two tasks. Default: the setting "
            "max_memory_per_child, else never.",
        ),
    ] = None,
    burst: Annotated[
        bool,
        Option("--burst", help="Exit when nothing is left that this worker can run now."),
    ] = False,
    reload: Annotated[
        bool,
        Option(
            "--reload", help="Restart when a Python file of the project changes; for development."
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        Option(
            "--metrics-port", metavar="PORT", help="Serve /metrics, /health, /ready and /scale."
        ),
    ] = None,
    metrics_host: Annotated[
        str, Option("--metrics-host", metavar="HOST", help="Address to serve metrics on.")
    ] = "127.0.0.1",
    metrics_names: Annotated[
        list[str] | None,
        Option(
            "--metrics-name",
            metavar="NAME",
            help="A host name by which clients may request them, besides addresses and localhost; "
            "repeatable.",
        ),
    ] = None,
    lifespan: Annotated[
        str | None,
        Option(
            "--lifespan",
            metavar="PATH",
            help="An async context manager that each process enters before its first task, such as "
            "app.tasks.lifespan; what it yields is ctx.state.",
        ),
    ] = None,
    middleware: Annotated[
        list[str] | None,
        Option(
            "--middleware",
            metavar="PATH",
            help="A function around each run, such as app.mw.sentry; repeatable, the first is the outermost.",
        ),
    ] = None,
    otel: Annotated[
        bool, Option("--otel", help="Record an OpenTelemetry span for each run.")
    ] = False,
    log_level: Annotated[
        str | None,
        Option("--log-level", metavar="LEVEL", help="Lowest level to log: DEBUG, INFO, WARNING, …"),
    ] = None,
    log_format: Annotated[
        str | None,
        Option(
            "--log-format", metavar="text|json", help="Lines for people, or one JSON object each."
        ),
    ] = None,
) -> NoReturn:
    """Run the tasks of these modules until stopped.

    On SIGTERM or Ctrl-C it claims no more tasks, lets running tasks finish, releases those that
    do not finish in time, and exits with 0. A second signal ends it within a second.

    It runs the functions that the modules define, except those whose names begin with an underscore. It
    also imports the modules below a package that mark functions with `@task`, and runs these. A named
    module is searched for in the current folder first; other imports search that folder last, and not
    at all with PYTHONSAFEPATH.
    """
    command = WorkerCommand(
        modules=modules or [],
        processes=processes,
        url=url,
        concurrency=concurrency,
        queues=None if queues is None else [name.strip() for name in queues.split(",")],
        poll_interval=poll_interval,
        lease=lease,
        shutdown_timeout=shutdown_timeout,
        max_tasks_per_child=max_tasks_per_child,
        max_memory_per_child=max_memory_per_child,
        burst=burst,
        reload=reload,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        metrics_names=metrics_names or [],
        lifespan=lifespan,
        middleware=middleware,
        otel=otel,
        log_level=log_level,
        log_format=log_format,
    )
    command.run()
