"""What `omniq worker` was told, and the process that does it.

Whoever reads a command line needs much that a worker does not, and a worker stays for months. So the
command, once understood, is handed on to a fresh process in its place: the same number, the same
parent, and the same command line for whoever looks at it.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

import msgspec

from omniq.errors import SettingsError
from omniq.settings import Settings
from omniq.worker.process import console
from omniq.worker.process.supervisor import Worker

_VARIABLE = "_OMNIQ_WORKER_COMMAND"


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `omniq worker`. None is what the settings say."""

    modules: list[str]
    processes: int
    url: str | None = None
    concurrency: int | None = None
    queues: list[str] | None = None
    poll_interval: float | None = None
    lease: float | None = None
    shutdown_timeout: float | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    otel: bool = False
    log_level: str | None = None

    def settings(self) -> Settings:
        """The settings with these options on top."""
        return Settings.load(
            url=self.url,
            concurrency=self.concurrency,
            poll_interval=self.poll_interval,
            lease=self.lease,
            shutdown_timeout=self.shutdown_timeout,
            log_level=self.log_level,
        )

    def run(self) -> NoReturn:
        """Be the worker, and leave with its exit code."""
        settings = self.settings()
        make_current_folder_importable()
        console.start_logging(settings.log_level)
        # A lease that was asked for task_queue comes before one that stands in the URL.
        runner = Worker(
            settings.url,
            self.modules,
            processes=self.processes,
            queues=self.queues,
            lease=self.lease,
            settings=settings,
            listeners=self._listeners(),
        )
        if self.metrics_port is None:
            code = runner.run()
        else:
            from omniq.integrations.endpoint import watched

            with watched(runner, self.metrics_host, self.metrics_port) as port:
                console.write(f"metrics on http://{self.metrics_host}:{port}/metrics\n")
                code = runner.run()
        if runner.wants_restart:
            console.start_anew()
        console.leave(code, at_once=runner.was_cut_off)

    def _listeners(self) -> list[str]:
        """What listens in each process. Imported there, and only if it is wanted."""
        if self.otel and find_spec("opentelemetry") is None:
            raise SettingsError("--otel needs more: pip install 'omniq[otel]'")
        wanted = {
            "omniq.integrations.prometheus.Counters": self.metrics_port is not None,
            "omniq.integrations.otel.Spans": self.otel,
        }
        return [path for path, is_wanted in wanted.items() if is_wanted]


def exec_worker(orders: WorkerCommand) -> NoReturn:
    """Have a fresh process obey them in the place of this one, where the system can do that."""
    orders.settings()
    if os.name == "posix":
        os.environ[_VARIABLE] = msgspec.json.encode(orders).decode()
        console.start_anew()
    orders.run()


def received_command() -> WorkerCommand | None:
    """What this process was started to do, if it was for that."""
    text = os.environ.pop(_VARIABLE, None)
    return None if text is None else msgspec.json.decode(text, type=WorkerCommand)


def make_current_folder_importable() -> None:
    """Put the current folder first on the path, as `python -m` does."""
    folder = os.getcwd()
    if not {"", folder} & set(sys.path[:1]):
        sys.path.insert(0, folder)
