"""The HTTP endpoints of a worker, for Prometheus, Kubernetes and autoscalers.

| path | |
|---|---|
| `/metrics` | all metrics, for Prometheus |
| `/health` | 200 while the process runs: restart it if there is no response |
| `/ready` | 200 while it claims tasks and the storage responds, else 503 and the reason |
| `/scale` | JSON for an autoscaler: `oldest_due_age` in seconds, `waiting` tasks, `workers` |
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from omniq.errors import OmniqError, SettingsError
from omniq.integrations.storage_metrics import StorageMetrics
from omniq.models import TaskStatus
from omniq.worker.process.supervisor import Worker

_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_TEXT = "text/plain; charset=utf-8"

Reply = tuple[int, str, bytes]


@contextmanager
def metrics_server(worker: Worker, host: str, port: int) -> Iterator[int]:
    """Serve the endpoints of a worker whose listeners include `prometheus.Counters`; yields the port.

    Enter it before the worker runs. Several processes count in files that `prometheus_client` adds
    up, in a temporary folder.
    """
    with _metrics_folder(worker.processes), StorageMetrics(worker.storage) as storage_metrics:
        endpoints = _endpoints(worker, storage_metrics)
        try:
            server = _Server((host, port), _handler(endpoints))
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        thread = threading.Thread(target=server.serve_forever, name="omniq-metrics", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _endpoints(worker: Worker, storage_metrics: StorageMetrics) -> dict[str, Callable[[], Reply]]:
    try:
        # Imported when the folder is set: prometheus_client chooses on import where it counts.
        from prometheus_client import (
            CONTENT_TYPE_LATEST,
            REGISTRY,
            CollectorRegistry,
            exposition,
            multiprocess,
        )
    except ModuleNotFoundError as error:
        raise SettingsError("metrics need an extra: pip install 'omniq[prometheus]'") from error
    from omniq.integrations.prometheus import StorageCollector

    registry = CollectorRegistry()
    registry.register(StorageCollector(storage_metrics))
    if worker.processes > 1:
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]

    def metrics() -> Reply:
        text = exposition.generate_latest(registry)
        if worker.processes == 1:
            text += exposition.generate_latest(REGISTRY)
        return 200, CONTENT_TYPE_LATEST, text

    def ready() -> Reply:
        if not worker.is_ready:
            return 503, _TEXT, b"not claiming tasks: the worker is starting or stopping\n"
        try:
            storage_metrics.read()
        except OmniqError as error:
            return 503, _TEXT, f"{error}\n".encode()
        return 200, _TEXT, b"ready\n"

    def scale() -> Reply:
        try:
            stats, workers = storage_metrics.read()
        except OmniqError as error:
            return 503, _TEXT, f"{error}\n".encode()
        waiting = stats.by_status[TaskStatus.PENDING] + stats.by_status[TaskStatus.RETRYING]
        values = {
            "oldest_due_age": round(stats.oldest_due_age, 3),
            "waiting": waiting,
            "workers": len(workers),
        }
        return 200, "application/json", json.dumps(values).encode()

    return {
        "/metrics": metrics,
        "/health": lambda: (200, _TEXT, b"ok\n"),
        "/ready": ready,
        "/scale": scale,
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


def _handler(endpoints: dict[str, Callable[[], Reply]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0
        """Seconds that a client may take to send its request."""

        def do_GET(self) -> None:
            endpoint = endpoints.get(self.path.partition("?")[0])
            status, kind, body = endpoint() if endpoint else (404, _TEXT, b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "omniq"

        def log_message(self, *args: object) -> None:
            """Log nothing: scrapes are frequent."""

    return Handler


@contextmanager
def _metrics_folder(processes: int) -> Iterator[None]:
    """A folder for the counts of several processes, unless the environment names one."""
    if processes == 1 or os.environ.get(_FOLDER_VARIABLE):
        yield
        return
    folder = tempfile.mkdtemp(prefix="omniq-metrics-")
    os.environ[_FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        del os.environ[_FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)
