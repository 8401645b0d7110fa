"""The parsed `omniq worker` command, and the process that runs it.

Parsing a command line imports modules that a worker does not need, and a worker runs for months. So
the process replaces itself by a new program, which gets the parsed command in a variable. It has
the same process id, the same parent and the same command line.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import NoReturn

import msgspec

from omniq.errors import SettingsError
from omniq.log import LogConfig
from omniq.settings import Settings
from omniq.worker.import_path import use_current_folder
from omniq.worker.process import console
from omniq.worker.process.supervisor import Worker

_VARIABLE = "_OMNIQ_WORKER_COMMAND"


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `omniq worker`. None: the value of the settings applies."""

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
    metrics_names: list[str] = []
    otel: bool = False
    log_level: str | None = None
    log_format: str | None = None

    def settings(self) -> Settings:
        """The settings, overridden by these options."""
        return Settings.load(
            url=self.url,
            concurrency=self.concurrency,
            poll_interval=self.poll_interval,
            lease=self.lease,
            shutdown_timeout=self.shutdown_timeout,
            log_level=self.log_level,
            log_format=self.log_format,
        )

    def run(self) -> NoReturn:
        """Run the worker in this process, and exit with its exit code."""
        with warnings.catch_warnings(record=True) as found:
            settings = self.settings()
        use_current_folder(self.modules)
        console.start_logging(LogConfig.of(settings))
        for warning in found:
            console.note(str(warning.message), "WARNING")
        # A lease from the command line overrides one in the URL.
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
            from omniq.integrations.endpoint import metrics_server

            host, names = self.metrics_host, self.metrics_names
            with metrics_server(runner, host, self.metrics_port, names) as port:
                console.note(f"metrics on http://{self.metrics_host}:{port}/metrics")
                code = runner.run()
        if runner.needs_restart:
            console.restart_process()
        console.exit_process(code, at_once=runner.was_cut_off)

    def _listeners(self) -> list[str]:
        """Paths of the listeners of each process, which imports them."""
        if self.otel and find_spec("opentelemetry") is None:
            raise SettingsError("--otel needs an extra: pip install 'omniq[otel]'")
        enabled = {
            "omniq.integrations.prometheus.Counters": self.metrics_port is not None,
            "omniq.integrations.otel.Spans": self.otel,
        }
        return [path for path, is_enabled in enabled.items() if is_enabled]


def exec_worker(command: WorkerCommand) -> NoReturn:
    """Replace this process by a new one that runs the command, on systems that can do that."""
    # Fails here if the settings are wrong, before the process is replaced.
    with warnings.catch_warnings(action="ignore"):
        # The new process shows them.
        command.settings()
    if os.name == "posix":
        os.environ[_VARIABLE] = msgspec.json.encode(command).decode()
        console.restart_process()
    command.run()


def received_command() -> WorkerCommand | None:
    """The command that `exec_worker` passed to this process, if it did."""
    text = os.environ.pop(_VARIABLE, None)
    return None if text is None else msgspec.json.decode(text, type=WorkerCommand)
