"""The HTTP endpoints of a worker, for Prometheus, Kubernetes and autoscalers.

| path | |
|---|---|
| `/metrics` | all metrics, for Prometheus |
| `/health` | 200 while the process runs: restart it if there is no response |
| `/ready` | 200 while it claims tasks and the storage responds, else 503 and the reason |
| `/scale` | JSON for an autoscaler: `oldest_due_age` in seconds, `waiting` tasks, `workers` |

All but `/health` answer only requests whose `Host` is an address, `localhost`, or a name that was
allowed: a web page could otherwise read them through a name under its control that leads to this machine.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from omniq.errors import OmniqError, SettingsError
from omniq.integrations.storage_metrics import StorageMetrics
from omniq.models import TaskStatus
from omniq.worker.process.supervisor import Worker

_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_TEXT = "text/plain; charset=utf-8"

_UNKNOWN_HOST = b"unknown host name: use an address, or allow the name with --metrics-name\n"
_NO_STORAGE = b"the storage does not respond: see the log of the worker, or run omniq doctor\n"

Reply = tuple[int, str, bytes]


@contextmanager
def metrics_server(
    worker: Worker, host: str, port: int, names: Collection[str] = ()
) -> Iterator[int]:
    """Serve the endpoints of a worker whose listeners include `prometheus.Counters`; yields the port.

    `names` are the host names that clients may use, besides addresses and `localhost`. Enter it before the worker runs. Several processes count in files that `prometheus_client` adds
    up, in a temporary folder.
    """
    with _metrics_folder(worker.processes), StorageMetrics(worker.storage) as storage_metrics:
        endpoints = _endpoints(worker, storage_metrics)
        try:
            server = _Server((host, port), _handler(endpoints, frozenset(map(str.lower, names))))
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
        except OmniqError:
            return 503, _TEXT, _NO_STORAGE
        return 200, _TEXT, b"ready\n"

    def scale() -> Reply:
        try:
            stats, workers = storage_metrics.read()
        except OmniqError:
            return 503, _TEXT, _NO_STORAGE
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


def is_known_host(header: str | None, names: Collection[str]) -> bool:
    """Whether a request with this `Host` header may be answered.

    A browser always sends one. A program that sends none was not misled by a name.

    >>> hosts = ("10.1.2.3:9000", "[::1]:9000", "localhost", "worker:9000", "evil.example")
    >>> [is_known_host(host, {"worker"}) for host in hosts]
    [True, True, True, True, False]
    """
    if header is None:
        return True
    try:
        name = (urlsplit(f"//{header}").hostname or "").lower()
        if name == "localhost" or name in names:
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _handler(
    endpoints: dict[str, Callable[[], Reply]], names: Collection[str]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0
        """Seconds that a client may take to send its request."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            endpoint = endpoints.get(path)
            if path != "/health" and not is_known_host(self.headers.get("Host"), names):
                status, kind, body = 403, _TEXT, _UNKNOWN_HOST
            else:
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
