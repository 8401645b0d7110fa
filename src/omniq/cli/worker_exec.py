"""Executes the parsed `omniq worker` command."""

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
    max_tasks_per_child: int | None = None
    max_memory_per_child: int | None = None
    burst: bool = False
    reload: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_names: list[str] = []
    lifespan: str | None = None
    middleware: list[str] | None = None
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
            max_tasks_per_child=self.max_tasks_per_child,
            max_memory_per_child=self.max_memory_per_child,
            lifespan=self.lifespan,
            middleware=self.middleware,
            log_level=self.log_level,
            log_format=self.log_format,
        )

    def run(self) -> NoReturn:
        """Run the worker in this process, and exit with its exit code."""
        with warnings.catch_warnings(record=True) as found:
            settings = self.settings()
        if self.modules:
            use_current_folder(self.modules)
        else:
            use_current_folder(settings.modules, settings.modules_folder())
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
            burst=self.burst,
            reload=self.reload,
            middleware=self._middleware(settings),
        )
        if settings.url is not None and self.url is not None:
            # A task that opens a queue without a URL means the storage of its worker. It is in the arguments
            # of this process already, which more users can read than its environment.
            os.environ["OMNIQ_URL"] = settings.url
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

    def _middleware(self, settings: Settings) -> list[str]:
        """Paths of the middleware of each process."""
        recording = ["omniq.integrations.otel.record_exception"] if self.otel else []
        return [*recording, *settings.middleware]

    def _listeners(self) -> list[str]:
        """Paths of the listeners of each process, which imports them."""
        if self.otel and find_spec("opentelemetry") is None:
            raise SettingsError("--otel needs an extra: pip install 'omniq[otel]'")
        enabled = {
            "omniq.integrations.prometheus.Counters": self.metrics_port is not None,
            "omniq.integrations.otel.Spans": self.otel,
        }
        return [path for path, is_enabled in enabled.items() if is_enabled]
