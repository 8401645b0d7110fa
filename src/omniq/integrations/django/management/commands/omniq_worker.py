"""`manage.py omniq_worker`: runs the tasks of the installed applications."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from omniq.errors import OmniqError
from omniq.integrations.django import backend as tasks
from omniq.log import LogConfig
from omniq.settings import Settings
from omniq.worker.process import console
from omniq.worker.process.supervisor import Worker


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

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the worker until it stops."""
        settings = Settings.load()
        console.start_logging(LogConfig.of(settings))
        queues = options["queues"]
        try:
            worker = Worker(
                self._url(options["backend"]),
                ["omniq.integrations.django.setup", *(options["modules"] or _modules())],
                options["concurrency"],
                options["processes"],
                queues=None if queues is None else [name.strip() for name in queues.split(",")],
                settings=settings,
            )
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


def _modules() -> list[str]:
    """The `tasks` modules of the installed applications."""
    found = tasks.task_modules()
    if not found:
        raise CommandError("no installed application has a module `tasks`: pass module names")
    return found
