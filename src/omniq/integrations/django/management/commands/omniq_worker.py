"""`manage.py omniq_worker`: runs the tasks of the installed applications."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from omniq.errors import OmniqError
from omniq.integrations.django import backend as tasks
from omniq.log import LogConfig
from omniq.settings import Settings
from omniq.worker.process import console
from omniq.worker.process.supervisor import Worker

_COUNTERS = "omniq.integrations.prometheus.Counters"


class Command(BaseCommand):
    help = "Run tasks until SIGTERM or Ctrl-C; running tasks may then finish."

    def add_arguments(self, parser: CommandParser) -> None:
        """The main options of `omniq worker`; settings configure the others."""
        parser.add_argument(
            "modules", nargs="*", help="default: the module `tasks` of each installed application"
        )
        parser.add_argument("--backend", default="default", help="key in TASKS")
        parser.add_argument("--concurrency", type=int, help="tasks at a time per process")
        parser.add_argument("--processes", type=int, default=1)
        parser.add_argument("--queues", help="only these queues, for example a,b")
        parser.add_argument(
            "--shutdown-timeout", type=float, help="seconds that running tasks have after a stop"
        )
        parser.add_argument(
            "--burst", action="store_true", help="end when nothing is left to run now"
        )
        parser.add_argument(
            "--reload", action="store_true", help="restart when a Python file changes"
        )
        parser.add_argument("--metrics-port", type=int, help="serve /metrics and /health here")
        parser.add_argument("--log-level", help="lowest level to log, such as DEBUG")
        parser.add_argument("--lifespan", help="path of the lifespan of each process")
        parser.add_argument(
            "--middleware",
            action="append",
            help="path of a middleware; repeatable, first outermost",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the worker until it stops."""
        queues, metrics_port = options["queues"], options["metrics_port"]
        try:
            settings = Settings.load(
                **{
                    name: options[name]
                    for name in ("lifespan", "middleware", "shutdown_timeout", "log_level")
                }
            )
            console.start_logging(LogConfig.of(settings))
            worker = Worker(
                self._url(options["backend"]),
                ["omniq.integrations.django.setup", *(options["modules"] or _modules())],
                options["concurrency"],
                options["processes"],
                queues=None if queues is None else [name.strip() for name in queues.split(",")],
                settings=settings,
                listeners=[] if metrics_port is None else [_COUNTERS],
                burst=options["burst"],
                reload=options["reload"],
            )
            with nullcontext() if metrics_port is None else _metrics(worker, metrics_port):
                code = worker.run()
        except OmniqError as error:
            raise CommandError(str(error)) from error
        if worker.needs_restart:
            console.restart_process()
        console.exit_process(code, at_once=worker.was_cut_off)

    def _url(self, alias: str) -> str | None:
        framework = __import__(tasks.FRAMEWORK, fromlist=["task_backends"])
        backend = framework.task_backends[alias]
        if not isinstance(backend, tasks.OmniqBackend):
            raise CommandError(f"TASKS[{alias!r}] is not an omniq backend")
        url: str | None = backend.options.get("url")
        return url


def _metrics(worker: Worker, port: int) -> AbstractContextManager[object]:
    from omniq.integrations.endpoint import metrics_server

    return metrics_server(worker, "127.0.0.1", port, [])


def _modules() -> list[str]:
    """The `tasks` modules of the installed applications."""
    found = tasks.task_modules()
    if not found:
        raise CommandError("no installed application has a module `tasks`: pass module names")
    return found
